from kvtiers.events import PRIMARY, tier_label


def test_a_label_is_the_place_and_the_type():
    assert tier_label(0, "primary") == PRIMARY == "0:primary"
    assert tier_label(2, "fs") == "2:fs"

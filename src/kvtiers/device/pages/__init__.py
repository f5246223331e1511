"""Page maps made from what an engine knows of its tensors. Pure, and no engine's own.

One module for each kind of layer: :mod:`attention`, :mod:`latent` and :mod:`state`; the ranks'
parts are :mod:`shares`, byte runs come from :mod:`boxes`, and :mod:`report` says what was made.
"""

import sys, pytest
@pytest.mark.parametrize("kind",["llama","gemma3","qwen3_next"])
@pytest.mark.parametrize("bpc",[1,2])
def test_x(kind, bpc, engine, prompt):
    kw=dict(kv_transfer_config={"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"spec_name":"HBSpec","spec_module_path":"hbspec","cpu_bytes_to_use":1<<28,"blocks_per_chunk":bpc}})
    with engine(kind,**kw) as e:
        P=prompt(1400)
        cold=e.ask(P); hit=e.ask(P); c=e.cached
        e.ask(prompt(300,seed=9)); e.ask(prompt(300,seed=10))
        e.forget_device()
        host=e.ask(P); ch=e.cached
        if bpc==1: assert host==hit
        print(kind,bpc,'dev',c,'host',ch,host==hit,host[0].distance(hit[0]),file=sys.stderr)
        if ch!=c:
            e.forget_device()
            e.ask(P[:ch[0]+1]); e.ask  # device hit of the same length

"""Decode steps of the 8-layer shape as graphs, variants in turns."""
import argparse, gc, statistics, sys, tempfile, time, random, dataclasses
from dataclasses import replace
from pathlib import Path
import numpy as np, torch
from vexpert import LLM
from vexpert.bench.engine.files import find_model_shape, write_adapter, write_model
import vexpert.ops.packed_linear as pl, vexpert.ops.fused_experts as fe
from vexpert.ops.dense_plan import choose_dense_plan, DensePlan
from vexpert.ops.moe_plan import choose_plan
from vexpert.kernels.dense_tiles import DenseTile
from vexpert.kernels.dense_shrink import DenseShrink
from vexpert.kernels.switches import ON
from vexpert.engine.graphs import GraphKey

CPU = not torch.cuda.is_available()
T0 = time.time()
class Bench:
    def __init__(self, out, slots=32):
        self.out = open(out, "w"); self.slots = slots
        shape = find_model_shape("tiny" if CPU else "qwen3-30b-a3b-8l")
        folder = Path(tempfile.mkdtemp()); write_model(folder/"m", shape); nb = write_adapter(folder/"a", shape, 16, seed=0)
        kw = dict(model=str(folder/"m"), load_format="dummy", max_model_len=4096, max_num_seqs=128, kv_cache_memory=(1<<24 if CPU else 2<<30), enable_lora=True,
                  dtype="float32" if CPU else "bfloat16", lora_memory=int(1.2*slots*nb*(1+CPU))+(1<<20), lora_host_memory=int(1.2*nb)*2+(1<<20), max_loras=slots, warm_up="none")
        if CPU: kw["device"]="cpu"
        self.llm = LLM(**kw); eng = self.eng = self.llm.engine
        self.say("engine", round(time.time()-T0,1))
        man = self.man = eng._adapters
        man.load("x", str(folder/"a"), pinned=True)
        while not any(man.pool._residents[s] and man.pool._residents[s].is_published for s in range(slots)):
            man.advance(True); time.sleep(0.01)
        self.spread()
        self.say("adapters", round(time.time()-T0,1))
        self.graphs = eng._runner._graphs
        if CPU:
            from vexpert.engine.graphs import DecodeGraphs; from vexpert.engine.graph_buffers import GraphBuffers
            class Cap:
                def capture(self, run): run(); return run
            self.graphs = DecodeGraphs(eng.model, man, GraphBuffers(eng.model.info, 128, 64, 16), (1,2,4,8), Cap())
        self.model = self.graphs._model
        with torch.inference_mode():
            for layer in self.model.layers:
                layer.keys.normal_(); layer.values.normal_()
        self.originals = dict(dense=choose_dense_plan, moe=choose_plan)
        self.cells = {}
    def say(self, *a):
        print(*a, flush=True); print(*a, file=self.out, flush=True)
    def spread(self):
        pool = self.man.pool; t = pool._tables; res = pool._residents[0]; assert res, pool._residents
        span = pool.arena.allocator.rounded(res.size); buf = pool.arena.buffer
        with torch.inference_mode():
            for s in range(1, self.slots):
                col = t.device[:, 0].clone(); host = t.host[:, 0].clone()
                for f, table in zip(t.first_row, t.site_tables):
                    n = (table.packed.shape[0]-3)//4
                    for r in (f+1, *range(f+3+2*n, f+3+3*n)):
                        col[r] += s*span; host[r] += s*span
                    table.host_rank[s] = table.host_rank[0]
                t.device[:, s] = col; t.host[:, s] = host; t._ranks[:, s] = t._ranks[:, 0]
                a = res.start + s*span
                buf[a:a+res.size] = buf[res.start:res.start+res.size]*(1-s/64)
        t._signatures.clear()
    def fill(self, rows, adapters, base=0):
        b = self.graphs._buffers; b.rows.clear(); ar = b.rows.arrays; rng = np.random.default_rng(rows)
        V = self.model.info.vocab_size; bs = self.model.block_size
        ar.token_ids[:rows] = rng.integers(2, V, rows); ar.positions[:rows] = 100; ar.kv_lens[:rows] = 101
        w = 100//bs+1; tables = 1+np.arange(rows*w).reshape(rows, w)
        ar.cache_rows[:rows] = tables[:, -1]*bs + 100 % bs
        ar.query_starts[:rows+1] = np.arange(rows+1); ar.query_starts[rows+1:] = rows
        slots = np.arange(rows) % adapters if adapters else np.full(rows, -1)
        slots = rng.permutation(slots); slots[:base] = -1
        ar.slots[:rows] = slots
        b._fill()
        with torch.inference_mode():
            b._tables[:rows, :w] = torch.from_numpy(tables).to(b._tables.device)
        if not adapters: return None
        sl = b.slots(rows); active = tuple(sorted(set(slots[slots >= 0].tolist())))
        return self.man.batch_view(sl, sl, active)
    def use(self, v):
        """v: dict(on={}, dense=fn(shape, adapters, plan)->plan, moe=fn(shape, adapters, plan)->plan)"""
        ON.update({k: 0 for k in ON}); ON.update(v.get("on", {}))
        d, m = v.get("dense"), v.get("moe")
        o = self.originals
        pl.choose_dense_plan = (lambda s, a: d(s, a, o["dense"](s, a))) if d else o["dense"]
        fe.choose_plan = (lambda s, a: m(s, a, o["moe"](s, a))) if m else o["moe"]
    def run(self, cells, variants, rounds=5, reps=8, budget=70):
        """cells: (rows, adapters); variants: name -> (dict, applies(rows, adapters))"""
        works = []
        for rows, ad in cells:
            view = self.fill(rows, ad)
            for name, (v, applies) in variants.items():
                if applies(rows, ad): works.append((rows, ad, name, v, view))
        t = time.time()
        if not CPU:
            from vexpert.kernels.compile_ahead import compile_only
            bad = set()
            with compile_only():
                for rows, ad, name, v, view in works:
                    self.use(v); self.fill(rows, ad)
                    try: self.graphs._work(rows, view)()
                    except Exception as e: self.say("compile", rows, ad, name, type(e).__name__, str(e)[:200]); bad.add((rows, ad, name))
            works = [w for w in works if w[:3] not in bad]
        self.say("compiled", round(time.time()-t,1), "s at", round(time.time()-T0,1))
        for rows, ad in cells:
            if time.time()-T0 > budget: self.say("out of time"); break
            own = []; ref = None
            for r, a, name, v, view in works:
                if (r, a) != (rows, ad): continue
                self.fill(rows, ad); self.use(v)
                try:
                    replay = self.graphs._capturer.capture(self.graphs._work(rows, view))
                    self.fill(rows, ad); replay(); one = self.graphs._buffers.logits[:rows].clone(); replay(); two = self.graphs._buffers.logits[:rows].clone()
                except Exception as e:
                    self.say(rows, ad, name, type(e).__name__, str(e)[:300]); continue
                if ref is None: ref = one
                err = float((one-ref).norm()/ref.norm()); agree = float((one.argmax(1)==ref.argmax(1)).float().mean())
                own.append((name, replay, err, agree, torch.equal(one, two)))
            times = {n: [] for n, *_ in own}
            if not CPU:
                for i in range(rounds):
                    for n, replay, *_ in own:
                        s, e = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                        replay(); s.record()
                        for _ in range(reps): replay()
                        e.record(); e.synchronize(); times[n].append(s.elapsed_time(e)/reps*1e3)
            else:
                for n in times: times[n] = [1.0]
            first = statistics.median(times[own[0][0]]) if own else 0
            for n, replay, err, agree, same in own:
                m = statistics.median(times[n])
                self.cells[rows, ad, n] = m
                self.say(f"{rows:4d} rows {ad:3d} ad  {n:34s} {m:8.1f} us  {m-first:+7.1f}  {(m-first)/8:+6.2f}/layer  err {err:.1e} same tokens {agree:.2f} {'' if same else 'NOT REPEATABLE'}")
        left = [int(t.arrivals) for t in self.man.pool.tables if int(t.arrivals)]
        self.say("arrivals not zero:", len(left), left[:5], "at", round(time.time()-T0,1))

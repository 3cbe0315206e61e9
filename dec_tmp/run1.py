import sys; sys.path.insert(0, "/work/scratch/gpu/dec"); import os
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import *
b = Bench(sys.argv[1])
def dense(tile_qkv=None, tile_o=None, inner=True, most=16, alone=False, shrink=None):
    def f(s, a, p):
        if s.rows > most or s.columns > 8192: return p
        if a == 0 and not alone: return p
        t = tile_o if s.columns <= 2048 else tile_qkv
        if t is not None:
            g = p.linear.group if p.linear else 8
            p = replace(p, linear=replace(t, group=g if a else 1))
        if p.linear is None: return p
        return replace(p, inner=inner and a > 0, shrink=shrink or p.shrink)
    return f
def moe(inner=True, planes=None, down=None, prefetch=None, k=128, kd=128):
    def f(s, a, p):
        if p.lora.by_run: return p
        q = replace(p.lora, inner=inner)
        if prefetch is not None: q = replace(q, prefetch=prefetch)
        if planes: q = replace(q, shrink=replace(q.shrink, planes=planes, block_k=k), down_shrink=replace(q.down_shrink, planes=down or planes, block_k=kd))
        return replace(p, lora=q)
    return f
D = DenseTile
S = DenseShrink
q8, o6 = D(16,64,128,4,8), D(16,16,256,4,6)
def few(rows, a=True):
    def f(s, ad, p):
        if s.columns > 8192: return p
        return replace(p, few_rows=rows) if s.rows <= rows else p
    return f
def both(*fs):
    def f(s, a, p):
        for g in fs: p = g(s, a, p)
        return p
    return f
P = dict(prefetch=1, few_warps=4)
R = dict(P, touch_order=1, ranked=0)
RN = dict(R, prefetch=0)
RD = dict(R, qkv=1, o_few=8, o_many=1); RDN = dict(RD, prefetch=0)
RDE = dict(RD, early_decode=1); RDNE = dict(RDN, early_decode=1)
W8 = dict(few_warps=8)
K = dict(ranked=1)
base = lambda *rows: (lambda r, a: a == 0 and r in rows)
lora = lambda *rows: (lambda r, a: a > 0 and r in rows)
at = lambda *rows: (lambda r, a: r in rows)
ta, tb, tc = (q8, o6), (D(16,32,256,4,5), D(16,32,128,4,8)), (D(16,64,128,4,4), D(16,16,256,4,4))
nofork = lambda s, a, p: replace(p, fork=False)
V = {
 "now": (dict(on=P), lambda r, a: True),
 "ranked": (dict(on=dict(R, **K)), base(1, 8, 32, 128)),
 "few 4 warps": (dict(on=R, dense=few(8)), base(1, 8)),
 "few 4 warps early": (dict(on=dict(R, early_decode=1), dense=few(8)), base(1, 8)),
 "few 8 warps early": (dict(on=dict(R, early_decode=1, **W8), dense=few(8)), base(1, 8)),
 "alone ta no prefetch": (dict(on=RN, dense=dense(*ta, alone=True, inner=False)), base(1, 8)),
 "alone tb no prefetch": (dict(on=RN, dense=dense(*tb, alone=True, inner=False)), base(1, 8)),
 "alone tb no prefetch early": (dict(on=dict(RN, early_decode=1), dense=dense(*tb, alone=True, inner=False)), base(1, 8)),
 "32 alone no prefetch q64/128/5 o32/128/5": (dict(on=RN, dense=dense(D(32,64,128,4,5), D(32,32,128,4,5), most=32, alone=True, inner=False)), base(32)),
 "32 alone no prefetch q32/256/4 o32/256/4": (dict(on=RN, dense=dense(D(32,32,256,4,4), D(32,32,256,4,4), most=32, alone=True, inner=False)), base(32)),
 "planes 8/6": (dict(on=R, moe=moe(False, 8, 6)), lora(1)),
 "planes 8/6 inner": (dict(on=R, moe=moe(True, 8, 6)), lora(1)),
 "few readers": (dict(on=RD, dense=few(8)), lora(1, 8)),
 "few readers early": (dict(on=RDE, dense=few(8)), lora(1, 8)),
 "few readers early, planes 8/6": (dict(on=RDE, dense=few(8), moe=moe(False, 8, 6)), lora(1)),
 "few readers early, planes 8/6 inner": (dict(on=RDE, dense=few(8), moe=moe(True, 8, 6)), lora(1)),
 "few readers early, planes 4/3 inner": (dict(on=RDE, dense=few(8), moe=moe(True, 4, 3, kd=256)), lora(1)),
 "few readers early, planes 8/6 inner no B first": (dict(on=RDE, dense=few(8), moe=moe(True, 8, 6, prefetch=False)), lora(1)),
 "library readers": (dict(on=RD, dense=lambda s, a, p: replace(p, linear=None, fork=False)), lora(1, 8)),
 "library readers no prefetch": (dict(on=RDN, dense=lambda s, a, p: replace(p, linear=None, fork=False)), lora(1, 8)),
 "library readers fork": (dict(on=RD, dense=lambda s, a, p: replace(p, linear=None, fork=True)), lora(1, 8)),
 "planes 2/2": (dict(on=R, moe=moe(False, 2, 2)), lora(8, 32)),
 "planes 4/3": (dict(on=R, moe=moe(False, 4, 3, kd=256)), lora(8)),
 "planes 2/2 inner": (dict(on=R, moe=moe(True, 2, 2)), lora(8, 32)),
 "planes 4/3 inner": (dict(on=R, moe=moe(True, 4, 3, kd=256)), lora(8)),
 "inner dense tb no prefetch": (dict(on=RN, dense=dense(*tb)), lora(8)),
 "readers tb no prefetch": (dict(on=RDN, dense=dense(*tb)), lora(8)),
 "readers tb no prefetch early": (dict(on=RDNE, dense=dense(*tb)), lora(8)),
 "readers tb early": (dict(on=RDE, dense=dense(*tb)), lora(8)),
 "readers tb no prefetch, planes 4/3 inner": (dict(on=RDN, dense=dense(*tb), moe=moe(True, 4, 3, kd=256)), lora(8)),
 "readers": (dict(on=RD), lora(32, 128)),
 "readers no fork": (dict(on=RD, dense=nofork), lora(32, 128)),
 "readers no fork no prefetch": (dict(on=RDN, dense=nofork), lora(32, 128)),
 "readers no fork early": (dict(on=RDE, dense=nofork), lora(32, 128)),
 "readers no fork, inner moe": (dict(on=RD, dense=nofork, moe=moe()), lora(32)),
 "32 readers inner no prefetch q32/256/4 o32/256/4": (dict(on=RDN, dense=dense(D(32,32,256,4,4), D(32,32,256,4,4), most=32)), lora(32)),
}
if CPU: cells = [(1,0),(1,1),(8,0),(8,2)]
else: cells = [(1,0),(1,1),(8,0),(8,1),(8,8),(32,0),(32,1),(32,32),(128,0),(128,8),(128,32)]
b.run(cells, V, budget=66)

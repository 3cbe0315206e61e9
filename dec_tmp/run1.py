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
def moe(inner=True, most=10**9, prefetch=None):
    def f(s, a, p):
        if s.tokens > most or p.lora.by_run: return p
        q = replace(p.lora, inner=inner)
        if prefetch is not None: q = replace(q, prefetch=prefetch)
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
OFF = {}
E = dict(early_decode=1); ET = dict(E, touch_order=1); ER = dict(ET, ranked=1)
RD = dict(ER, qkv=1, o_few=8, o_many=1)
base = lambda *rows: (lambda r, a: a == 0 and r in rows)
lora = lambda *rows: (lambda r, a: a > 0 and r in rows)
at = lambda *rows: (lambda r, a: r in rows)
V = {
 "now": (dict(), lambda r, a: True),
 "early": (dict(on=E), at(1, 8)),
 "ranked": (dict(on=ER), at(1, 8, 32, 128)),
 "few 4 warps": (dict(on=ER, dense=few(8)), base(1, 8)),
 "tiles alone q64/128/8 o16/256/6": (dict(on=ER, dense=dense(q8, o6, alone=True, inner=False)), base(8)),
 "tiles alone q32/128/8 o32/128/8": (dict(on=ER, dense=dense(D(16,32,128,4,8), D(16,32,128,4,8), alone=True, inner=False)), base(8)),
 "32 alone q64/128/5 o32/128/5": (dict(on=ER, dense=dense(D(32,64,128,4,5), D(32,32,128,4,5), most=32, alone=True, inner=False)), base(32)),
 "inner moe": (dict(on=ER, moe=moe()), lora(1, 8, 32, 128)),
 "inner moe, no prefetch": (dict(on=ER, moe=moe(prefetch=False)), lora(1, 8)),
 "inner both": (dict(on=ER, dense=dense(q8, o6), moe=moe()), lora(1, 8)),
 "readers": (dict(on=RD), lora(32, 128)),
 "readers, no fork": (dict(on=RD, dense=lambda s, a, p: replace(p, fork=False)), lora(32, 128)),
 "readers, inner moe": (dict(on=RD, moe=moe(), dense=dense(q8, o6)), lora(1, 8)),
 "readers, inner moe ": (dict(on=RD, moe=moe()), lora(32, 128)),
 "readers, inner moe, few": (dict(on=RD, moe=moe(), dense=few(8)), lora(1, 8)),
 "readers, few": (dict(on=RD, dense=few(8)), lora(1, 8)),
 "32 readers, inner all q64/128/5 o32/128/5": (dict(on=RD, moe=moe(), dense=dense(D(32,64,128,4,5), D(32,32,128,4,5), most=32)), lora(32)),
 "32 readers, inner dense": (dict(on=RD, dense=dense(D(32,64,128,4,5), D(32,32,128,4,5), most=32)), lora(32)),
}
if CPU: cells = [(1,0),(1,1),(4,2)]
else: cells = [(1,0),(1,1),(8,0),(8,1),(8,8),(32,0),(32,1),(32,32),(128,0),(128,8),(128,32)]
b.run(cells, V, budget=66)

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
E, ET = dict(early_decode=1), dict(early_decode=1, touch_order=1)
few = lambda r, a: r <= 16
fewl = lambda r, a: r <= 16 and a > 0
lora = lambda r, a: a > 0
every = lambda r, a: True
D = DenseTile
q8, o6 = D(16,64,128,4,8), D(16,16,256,4,6)
V = {
 "now": (dict(), every),
 "early": (dict(on=E), every),
 "touch": (dict(on=ET), lambda r, a: a > 0 and r > 1),
 "inner moe": (dict(on=ET, moe=moe()), lora),
 "inner dense": (dict(on=ET, dense=dense()), fewl),
 "inner both": (dict(on=ET, dense=dense(), moe=moe()), fewl),
 "both, no prefetch": (dict(on=ET, dense=dense(), moe=moe(prefetch=False)), fewl),
 "alone": (dict(on=ET, dense=dense(alone=True)), lambda r, a: few(r, a) and a == 0),
 "tile q64/128/8 o16/256/6": (dict(on=ET, dense=dense(q8, o6, alone=True), moe=moe()), few),
 "tile q32/128/8 o16/512/3": (dict(on=ET, dense=dense(D(16,32,128,4,8), D(16,16,512,4,3), alone=True), moe=moe()), few),
 "tile q32/256/5 o32/128/8": (dict(on=ET, dense=dense(D(16,32,256,4,5), D(16,32,128,4,8), alone=True), moe=moe()), few),
 "tile q16/256/6 o16/256/8": (dict(on=ET, dense=dense(D(16,16,256,4,6), D(16,16,256,4,8), alone=True), moe=moe()), few),
 "32: inner q64/128/4 o16/256/4": (dict(on=ET, dense=dense(D(32,64,128,4,4), D(32,16,256,4,4), most=32, alone=True), moe=moe()), lambda r, a: r == 32),
 "32: inner q32/128/5 o32/128/5": (dict(on=ET, dense=dense(D(32,32,128,4,5), D(32,32,128,4,5), most=32, alone=True), moe=moe()), lambda r, a: r == 32),
}
if CPU: cells = [(1,0),(1,1),(4,2)]
else: cells = [(1,0),(1,1),(8,0),(8,1),(8,8),(32,0),(32,1),(32,32),(128,0),(128,8),(128,32)]
b.run(cells, V, budget=66)

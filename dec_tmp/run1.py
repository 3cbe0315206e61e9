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
P = dict(prefetch=1, few_warps=8, few_tile=16384)
R = dict(P, touch_order=1, prefetch=0)
RD = dict(R, qkv=1, o_few=8, o_many=1)
RE, RDE = dict(R, early_decode=1), dict(RD, early_decode=1)
base = lambda *rows: (lambda r, a: a == 0 and r in rows)
lora = lambda *rows: (lambda r, a: a > 0 and r in rows)
at = lambda *rows: (lambda r, a: r in rows)
tb, td, te = (D(16,32,256,4,5), D(16,32,128,4,8)), (D(16,32,256,4,5), D(16,16,256,4,6)), (D(16,32,256,4,5), D(16,16,512,4,3))
t32a, t32b = (D(32,32,256,4,4), D(32,16,256,4,5)), (D(32,32,128,4,6), D(32,16,512,4,3))
nofork = lambda s, a, p: replace(p, fork=False)
def sh(*shape):
    return lambda s, a, p: replace(p, shrink=S(True, 16, *shape))
def inl(s, a, p): return replace(p, lora=replace(p.lora, inline=True))
inn2, inn1 = moe(True, 2, 2), moe(True, 1, 1)
V = {
 "now": (dict(on=P), lambda r, a: True),
 "few": (dict(on=R, dense=few(4)), base(1, 2)),
 "few early": (dict(on=RE, dense=few(4)), base(1, 2, 4)),
 "few early, half tiles": (dict(on=dict(RE, few_tile=8192), dense=few(4)), base(1)),
 "few early, 16 warps": (dict(on=dict(RE, few_warps=16), dense=few(4)), base(1)),
 "few early, double tiles, 16 warps": (dict(on=dict(RE, few_tile=32768, few_warps=16), dense=few(4)), base(1)),
 "alone td": (dict(on=R, dense=dense(*td, alone=True, inner=False)), base(4, 8)),
 "few readers": (dict(on=RD, dense=few(4)), lora(1)),
 "few readers early": (dict(on=RDE, dense=few(4)), lora(1, 2, 4)),
 "few readers early, half tiles": (dict(on=dict(RDE, few_tile=8192), dense=few(4)), lora(1)),
 "few readers early, 16 warps": (dict(on=dict(RDE, few_warps=16), dense=few(4)), lora(1)),
 "few readers early, inline": (dict(on=RDE, dense=few(4), moe=inl), lora(1)),
 "few readers early, inner 2/2": (dict(on=RDE, dense=few(4), moe=inn2), lora(1)),
 "inner tb, inner 2/2": (dict(on=R, dense=dense(*tb), moe=inn2), lora(8)),
 "inner td, inner 2/2": (dict(on=R, dense=dense(*td), moe=inn2), lora(4, 8)),
 "inner te, inner 2/2": (dict(on=R, dense=dense(*te), moe=inn2), lora(8)),
 "readers tb, inner 2/2": (dict(on=RD, dense=dense(*tb), moe=inn2), lora(8)),
 "readers td, inner 2/2": (dict(on=RD, dense=dense(*td), moe=inn2), lora(4, 8)),
 "readers td, inner 2/2 early": (dict(on=RDE, dense=dense(*td), moe=inn2), lora(8)),
 "readers td, inner 2/2, sites": (dict(on=dict(RD, sites=1), dense=dense(*td), moe=inn2), lora(8)),
 "readers, inner 2/2, sites": (dict(on=dict(RD, sites=1), moe=inn2), lora(32)),
 "readers, sites": (dict(on=dict(RD, sites=1)), lora(128)),
 "readers but o td, inner 2/2": (dict(on=dict(RD, o_few=0), dense=dense(*td), moe=inn2), lora(8)),
 "readers td, inner 1/1": (dict(on=RD, dense=dense(*td), moe=inn1), lora(8)),
 "readers": (dict(on=RD), lora(32, 128)),
 "readers, inner 1/1": (dict(on=RD, moe=inn1), lora(32)),
 "readers, inner 2/2": (dict(on=RD, moe=inn2), lora(32)),
 "readers, inner 2/2, no touch": (dict(on=dict(RD, touch_order=0), moe=inn2), lora(32)),
 "alone t32a": (dict(on=R, dense=dense(*t32a, most=32, alone=True, inner=False)), base(32)),
 "readers t32a, inner 2/2": (dict(on=RD, dense=dense(*t32a, most=32), moe=inn2), lora(32)),
 "readers t32b, inner 2/2": (dict(on=RD, dense=dense(*t32b, most=32), moe=inn2), lora(32)),
 "readers t32a o too, inner 2/2": (dict(on=dict(RD, o_few=32), dense=dense(*t32a, most=32), moe=inn2), lora(32)),
 "readers, shrink 64 4 128": (dict(on=RD, dense=sh(64, 4, 128, 4, 3)), lora(128)),
 "readers, shrink 64 8 256": (dict(on=RD, dense=sh(64, 8, 256, 4, 2)), lora(128)),
 "readers, shrink 16 2 128": (dict(on=RD, dense=sh(16, 2, 128, 4, 4)), lora(128)),
 "readers, shrink 16 1 256 2 warps": (dict(on=RD, dense=sh(16, 1, 256, 2, 4)), lora(128)),
 "readers no o, shrink 64 4 128": (dict(on=dict(RD, o_many=0), dense=sh(64, 4, 128, 4, 3)), lora(128)),
 "readers no qkv, shrink 64 4 128": (dict(on=dict(RD, qkv=0), dense=sh(64, 4, 128, 4, 3)), lora(128)),
}
if CPU: cells = [(1,0),(1,1),(8,0),(8,2)]
else: cells = [(1,0),(1,1),(2,0),(2,1),(4,0),(4,4),(8,0),(8,1),(8,8),(32,0),(32,1),(32,32),(128,8),(128,32)]
b.run(cells, V, budget=66)

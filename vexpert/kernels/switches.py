"""Variants under measurement; removed before anything is merged."""

ON: dict[str, int] = {"early_decode": 1, "touch_order": 1, "o_few": 8, "o_many": 1, "qkv": 1, "ranked": 1, "prefetch": 1, "few_warps": 8, "few_tile": 16384, "sites": 1}

"""Programs of a launch that wait for other programs of it.

Producers have the lowest numbers: the device starts programs in their order, so all of them run, or
have run, when a consumer waits. One int32, `arrivals`, counts: each producer adds 1 when it is
done, each consumer 1 when it need not wait any more, but for consumer 0, which takes off what all
others add. So it is 0 before and after, at least `producers` from the last producer to consumer 0,
and negative from there to the last consumer. Launches that share it must follow one another.
"""

import triton
import triton.language as tl


@triton.jit
def arrive(arrivals):
    """A producer: what it has stored is seen by all who have waited."""
    tl.debug_barrier()  # one thread announces what all of them have written
    tl.atomic_add(arrivals, 1, sem="release")


@triton.jit
def await_arrivals(arrivals, producers, consumers, consumer):
    """Consumer number `consumer` of so many: waits for all producers.

    What they stored must be loaded past the L1 cache.
    """
    count = tl.atomic_add(arrivals, 0, sem="acquire")
    while (count >= 0) & (count < producers):
        count = tl.atomic_add(arrivals, 0, sem="acquire")
    own = tl.where(consumer == 0, 1 - producers - consumers, 1)
    tl.atomic_add(arrivals, own, sem="relaxed")

"""Counters of warpgroups of several blocks of threads, which Pallas does not offer."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref


def _counter(order: str) -> Callable:
    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
    )
    def count(_, counter, shared):
        i32 = ir.IntegerType.get_signless(32)
        zero = arith.constant(ir.IndexType.get(), 0)
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            before = llvm.inline_asm(
                i32,
                [mgpu.utils.memref_ptr(counter)],
                f"atom.{order}.gpu.add.u32 $0, [$1], 1;",
                "=r,l",
                has_side_effects=True,
            )
            memref.store(before, shared, [zero])
        mgpu.utils.warpgroup_barrier()
        before = memref.load(shared, [zero])
        return mgpu.FragmentedArray.splat(before, (), is_signed=True)

    return count


take = _counter("relaxed")
"""take(counter, shared): add one to a counter in memory; returns what it was, by way of `shared`,
one number in shared memory, where it stays."""
count = _counter("acq_rel")
"""As `take`. And what the warpgroup has stored before, whoever counts later sees."""

"""A device in Python that is strict where a GPU is strict, and late where a GPU is late.

Its tensors wrap tensors of the CPU and say that they are on ``pretend:0``. Every operation on them
enters ``__torch_dispatch__``, which unwraps, computes on the CPU and wraps again. What fails, waits
or is garbage on a GPU does so here:

- operations that mix tensors of two devices are refused, 0-d tensors of the CPU excepted, and so is
  a generator of the CPU;
- each time that the host waits for the device (``item``, ``bool``, ``nonzero``, a boolean index, a
  blocking copy to or from it) is counted, with the lines that led to it;
- a copy with ``non_blocking=True`` between the device and *pinned* memory is late (``streams``);
- its random numbers come from a seed and an offset of its own;
- point-to-point messages carry no tags.

A process has one such device and cannot get rid of it, so ``install`` belongs in a worker that does
nothing else. torch keeps ``pin_memory`` and ``torch.accelerator`` in C++, where Python cannot reach
them: ``install`` replaces what the library calls of them.
"""

from __future__ import annotations

import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import attrs
import torch
import torch.distributed as dist
from device import streams
from device.streams import Copy, current_stream, spoil
from torch.nn.attention import SDPBackend
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
PEAK = 3 * 2**30
"""Bytes that the device says were allocated."""
LINES = 12
"""Of the stack to keep for each wait."""
COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
aten = torch.ops.aten
_READS = "_local_scalar_dense nonzero equal masked_select unique_dim _unique2 bincount"
_READS = {getattr(aten, name).default for name in _READS.split()} | {aten.repeat_interleave.Tensor}
_LOWER = "mm addmm bmm baddbmm matmul linear scaled_dot_product_attention"
_FLOAT32 = "rms_norm layer_norm softmax.int log_softmax.int rsqrt logsumexp"
"""What autocast does in 16 bits and in float32: as on CUDA, of what language models use."""


@attrs.define
class Ledger:
    """What a region cost that a GPU would feel.

    Attributes:
        waits: For each time that the host waited for the device, the operation and the lines that
            led to it.
        copied: Bytes copied ``"to"`` the device and ``"from"`` it, and those of them that were
            in ``"pageable"`` memory though the copy should not wait.
    """

    waits: list[str] = attrs.field(factory=list)
    copied: Counter[str] = attrs.field(factory=Counter)


_open: list[Ledger] = []
_refuses_waits = False
_CPU = torch.device("cpu")


@cache
def _device() -> torch.device:
    return torch.device(NAME, 0)  # not before the name is known


@contextmanager
def watching() -> Iterator[Ledger]:
    """Count what happens inside."""
    ledger = Ledger()
    _open.append(ledger)
    try:
        yield ledger
    finally:
        _open.remove(ledger)


def set_sync_debug_mode(mode: str) -> None:
    """Refuse that the host waits, as ``torch.cuda.set_sync_debug_mode("error")`` does."""
    global _refuses_waits
    _refuses_waits = mode == "error"


def _wait(what: str) -> None:
    """Let the host wait for the current stream, and note it."""
    if _refuses_waits:
        raise RuntimeError(f"called a synchronizing operation: {what}")
    if _open:
        frames = [f for f in traceback.extract_stack() if f.filename != __file__]
        lines = [f"{f.filename}:{f.lineno} {f.name}" for f in frames[-LINES:]]
        for ledger in _open:
            ledger.waits.append("\n  ".join([what, *lines]))
    current_stream().synchronize()


class PretendTensor(torch.Tensor):
    """A tensor on the pretend device; ``raw`` is the CPU tensor that holds its values."""

    raw: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> PretendTensor:
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset()}
        options = {"dtype": raw.dtype, "device": _device(), **layout}
        wrapper = torch.Tensor._make_wrapper_subclass(cls, raw.size(), **options)
        wrapper.raw = raw
        return wrapper

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history."""
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, PretendTensor):
            raise RuntimeError(f"set_data: a tensor on {self.device} cannot hold one of the CPU")
        torch.Tensor.data.__set__(self, other)
        self.raw = other.raw

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of the values: FSDP resizes it."""
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        """The address of the values."""
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        """The values, for which the host waits."""
        _wait("tolist")
        return self.raw.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse, as on a GPU."""
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy.")
        return self.detach().cpu().numpy()

    def record_stream(self, stream: Any) -> None:
        """Tell the allocator; there is none."""

    def pin_memory(self, _device: Any = None) -> torch.Tensor:
        """Refuse, as on a GPU."""
        raise RuntimeError(f"cannot pin a tensor on {self.device}, only dense CPU tensors")

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait("pickle")
        return PretendTensor, (self.raw.detach().clone(),)

    def __repr__(self, **_: Any) -> str:
        return f"PretendTensor({self.raw!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


@cache
def _is_collective(func: Any) -> bool:
    return func.namespace in COLLECTIVES


@cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation in which a tensor of the device takes part."""
    if func in _SPECIAL:
        return _SPECIAL[func](*args, **kwargs)
    ours: list[PretendTensor] = []
    others: list[Any] = []
    raw_args = [_unwrap(x, ours, others) for x in args]
    raw_kwargs = {name: _unwrap(x, ours, others) for name, x in kwargs.items()}
    if others:
        _refuse(func, ours, others)
    current_stream().proceed()
    if _is_read(func, args, kwargs):
        _wait(str(func))
    with _own_numbers() if _draws(func) else nullcontext():
        result = func(*raw_args, **raw_kwargs)
    for wrapper in ours:
        if wrapper.shape != wrapper.raw.shape:  # an `out=` that was empty
            _follow(wrapper)
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != NAME:
        return result  # empty_like(tensor, device="cpu")
    return _wrap(result, {id(x.raw): x for x in ours})


def _unwrap(value: Any, ours: list[PretendTensor], others: list[Any]) -> Any:
    """The values of an argument; notes its tensors of the device, others' and generators.

    Not through pytrees, which take longer than what is computed: a list is the only container.
    """
    kind = type(value)
    if kind is PretendTensor:
        ours.append(value)
        return value.raw
    if kind is list or kind is tuple:
        return [_unwrap(x, ours, others) for x in value]
    if kind is torch.device:
        return _CPU if value.type == NAME else value
    if isinstance(value, (torch.Tensor, _CpuGenerator)):
        others.append(value)
    return value


def _wrap(result: Any, wrappers: dict[int, PretendTensor]) -> Any:
    """The wrappers of what an operation returned, its own where it returned an argument."""
    if isinstance(result, torch.Tensor):
        return wrappers[id(result)] if id(result) in wrappers else PretendTensor(result)
    if type(result) in (list, tuple):
        return type(result)(_wrap(x, wrappers) for x in result)
    return result


def _follow(wrapper: PretendTensor) -> None:
    """Give a wrapper the shape that an operation in place gave to its values."""
    shaped = PretendTensor(wrapper.raw)
    with torch._C._DisableTorchDispatch():
        torch.Tensor.data.__set__(wrapper, shaped)


def _refuse(func: Any, ours: list[PretendTensor], others: list[Any]) -> None:
    """Raise if an operation mixes devices."""
    large = [x for x in others if isinstance(x, torch.Tensor) and (x.dim() or _is_collective(func))]
    if ours and large:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} got {ours[0].device} of "
            f"shape {tuple(ours[0].shape)} and {large[0].device} of {tuple(large[0].shape)}"
        )
    # Compared by address: C++ hands over a generator without its Python class.
    if any(isinstance(x, _CpuGenerator) and x._cdata not in _generators for x in others):
        raise RuntimeError(f"Expected a {NAME!r} device type for generator but found 'cpu'")


def _is_read(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host has to wait, because what comes out has a size that depends on values."""
    if func in _READS:
        return kwargs.get("output_size") is None
    if func is aten.index.Tensor:
        indices = args[1]
    elif func in (aten.index_put_.default, aten.index_put.default) and args[2].numel() != 1:
        indices = args[1]  # one value is filled in without a wait
    else:
        return False
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


# ---- copies


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.raw if isinstance(tensor, PretendTensor) else tensor


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy between two tensors, of which at least one is on the device."""
    source = source.expand(target.shape)
    to_host, from_host = (not isinstance(x, PretendTensor) for x in (target, source))
    raw_target, raw_source = _raw(target), _raw(source)
    if not (to_host or from_host):
        current_stream().proceed()
        raw_target.copy_(raw_source)
        return target
    host = raw_target if to_host else raw_source
    # Else bytes are not copied as they lie: torch goes through pageable memory.
    is_direct = raw_target.is_contiguous() and raw_source.is_contiguous()
    is_direct = is_direct and raw_target.dtype == raw_source.dtype
    is_late = non_blocking and is_pinned(host) and is_direct
    bytes_ = host.numel() * host.element_size()
    for ledger in _open:
        ledger.copied["from" if to_host else "to"] += bytes_
        ledger.copied["pageable"] += bytes_ if non_blocking and not is_late else 0
    if is_late:
        spoil(raw_target)
        current_stream().put(Copy(raw_source, raw_target, to_host))
        return target
    # The host waits until pageable memory was read or written, non-blocking or not; what is read
    # without blocking goes through memory of the driver and does not wait for the stream.
    if to_host or not non_blocking:
        _wait(f"copy {'from' if to_host else 'to'} the device, {tuple(host.shape)} {host.dtype}")
    current_stream().proceed()
    raw_target.copy_(raw_source)
    return target


def _to_copy(source: torch.Tensor, **options: Any) -> torch.Tensor:
    """Copy to another device, dtype or memory format."""
    device = torch.device(options.pop("device", None) or source.device)
    non_blocking = options.pop("non_blocking", False)
    options = {k: v for k, v in options.items() if k not in ("pin_memory", "layout")}
    if device.type == NAME and isinstance(source, PretendTensor):
        current_stream().proceed()
        return PretendTensor(aten._to_copy(source.raw, **options))
    raw = torch.empty_like(_raw(source), **options)
    if device.type == NAME:
        return _copy(PretendTensor(raw), source, non_blocking)
    return _copy(_pin(raw) if non_blocking else raw, source, non_blocking)


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    return _copy(target, source, non_blocking)


def _foreach_copy(targets: Any, sources: Any, non_blocking: bool = False) -> None:
    for target, source in zip(targets, sources, strict=True):
        _copy(target, source, non_blocking)


_pinned: set[int] = set()
"""Storages in pinned memory, which are kept: addresses would be given out again."""
_kept: list[torch.Tensor] = []


def _pin(raw: torch.Tensor) -> torch.Tensor:
    _pinned.add(raw.untyped_storage()._cdata)
    _kept.append(raw)
    return raw


def is_pinned(tensor: torch.Tensor, _device: Any = None) -> bool:
    """Whether a tensor of the CPU is in pinned memory."""
    return tensor.untyped_storage()._cdata in _pinned


# ---- operations that need more than to be unwrapped


def _resize(tensor: PretendTensor, size: Any, **_: Any) -> PretendTensor:
    tensor.raw.resize_(size)
    _follow(tensor)
    return tensor


def _send(tensors: Any, group: Any, peer: int, _tag: int) -> Any:
    current_stream().proceed()
    return torch.ops.c10d.send([_raw(x) for x in tensors], group, peer, 0)


def _receive(tensors: Any, group: Any, peer: int, _tag: int) -> Any:
    current_stream().proceed()
    return torch.ops.c10d.recv_([_raw(x) for x in tensors], group, peer, 0)


_SPECIAL: dict[Any, Any] = {
    aten.copy_.default: _copy,
    aten._copy_from.default: _copy_from,
    aten._to_copy.default: _to_copy,
    aten._foreach_copy_.default: _foreach_copy,
    aten.resize_.default: _resize,
    aten._fused_sdp_choice.default: lambda *_, **__: SDPBackend.MATH.value,
    torch.ops.c10d.send.default: _send,
    torch.ops.c10d.recv_.default: _receive,
}


# ---- random numbers


@attrs.define
class _Numbers:
    """A seed and how many operations have drawn, as a GPU's generator counts."""

    seed: int = 0
    offset: int = 0


_numbers = _Numbers()


@contextmanager
def _own_numbers() -> Iterator[None]:
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(_numbers.seed + _numbers.offset + 1)
    _numbers.offset += 4
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def manual_seed(seed: int) -> None:
    """Seed the device."""
    _numbers.seed, _numbers.offset = int(seed), 0


def get_rng_state(_device: Any = None) -> torch.Tensor:
    """Seed and offset as 16 bytes of the CPU, as CUDA gives them."""
    return torch.tensor([_numbers.seed, _numbers.offset]).view(torch.uint8)


def set_rng_state(state: torch.Tensor, _device: Any = None) -> None:
    """Put back what ``get_rng_state`` gave."""
    _numbers.seed, _numbers.offset = state.clone().view(torch.int64).tolist()


class _Generator(torch.Generator):
    """A generator of the device; ``torch.Generator`` makes one where it is asked to."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type == NAME:
            made = super().__new__(cls, "cpu")
            _generators[made._cdata] = made
            return made
        return _CpuGenerator(device)

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The device."""
        return _device()


_CpuGenerator = torch.Generator
_generators: dict[int, torch.Generator] = {}  # kept, so that no address is used again


# ---- installation


def install() -> str:
    """Make the device known to torch, once in a process; give the backend of process groups."""
    backend = types.ModuleType(f"torch.{NAME}")
    vars(backend).update(_backend())
    _setup_privateuseone_for_python_backend(NAME, backend)
    _register_kernels()
    _replace_what_stays_in_cpp()
    dist.Backend.default_device_backend_map[NAME] = "gloo"
    return f"cpu:gloo,{NAME}:gloo"


def _backend() -> dict[str, Any]:
    queues = (streams.Stream, streams.Event, streams.stream, streams.set_stream)
    queues += (streams.current_stream, streams.synchronize)
    numbers = (manual_seed, get_rng_state, set_rng_state, set_sync_debug_mode)
    return {one.__name__: one for one in queues + numbers} | {
        **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "device": lambda _device: nullcontext(),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "manual_seed_all": manual_seed,
        "initial_seed": lambda: _numbers.seed,
        "default_stream": lambda _device=None: streams.DEFAULT,
    }


_KERNELS, _EVERYTHING = (torch.library.Library(name, "IMPL") for name in ("aten", "_"))
"""Kept: a library takes its kernels with it."""


def _register_kernels() -> None:
    def empty(size: Any, **options: Any) -> PretendTensor:
        return PretendTensor(torch.empty(size, dtype=options.get("dtype")))

    def empty_strided(size: Any, stride: Any, **options: Any) -> PretendTensor:
        return PretendTensor(torch.empty_strided(size, stride, dtype=options.get("dtype")))

    _KERNELS.impl("empty.memory_format", empty, "PrivateUse1")
    _KERNELS.impl("empty_strided", empty_strided, "PrivateUse1")
    _KERNELS.impl("_copy_from", _copy_from, "PrivateUse1")
    _KERNELS.impl("_pin_memory", lambda x, _device=None: _pin(x.clone()), "CPU")
    _KERNELS.impl("is_pinned", is_pinned, "CPU")
    _EVERYTHING.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in _LOWER.split():
        _register_autocast(name, lambda: torch.get_autocast_dtype(NAME))
    for name in _FLOAT32.split():
        _register_autocast(name, lambda: torch.float32)


def _register_autocast(name: str, dtype: Callable[[], torch.dtype]) -> None:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(aten, packet), overload or "default")
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(value: Any) -> Any:
        is_wide = value.is_floating_point() and value.dtype is not torch.float64
        return value.to(dtype()) if is_wide else value

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(key):
            return operation(*args, **kwargs)

    _KERNELS.impl(name, run, "AutocastPrivateUse1")


def _replace_what_stays_in_cpp() -> None:
    backend, accelerator = _backend(), torch.accelerator
    shared = ["is_available", "device_count", "current_stream", "set_stream", "synchronize"]
    vars(accelerator).update({name: backend[name] for name in shared})
    accelerator.current_accelerator = lambda check_available=False: torch.device(NAME)
    accelerator.current_device_index = lambda: 0
    accelerator.set_device_index = lambda _index: None
    accelerator.max_memory_allocated = lambda _device=None: PEAK
    torch.Generator = _Generator
    empty_like = torch.empty_like

    def pinning_empty_like(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = empty_like(*args, **options)
        if pin_memory:
            _pin(getattr(made, "_local_tensor", made))  # of a DTensor
        return made

    torch.empty_like = pinning_empty_like

"""Triton's interpreter with less repeated work: kernels run several times as fast and compute the same numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

VERSIONS = ("3.6.", "3.7.", "3.8.")  # the versions of Triton that pyproject.toml allows


def make_faster() -> None:
    """Patch Triton in this process. Does nothing without Triton, in another version, or if a function is missing."""
    try:
        import triton
        from triton import language
        from triton.runtime import interpreter

        if not triton.__version__.startswith(VERSIONS):
            return
        core, builder, semantic = language.core, interpreter.interpreter_builder, interpreter.interpreter_semantic
        patches = [
            _launches(interpreter, language),
            _types(core),
            _handles(interpreter, core),
            _operands(semantic, interpreter, core),
            _builder(builder, interpreter, core),
        ]
    except (ImportError, AttributeError):
        return
    for target, name, function in (patch for group in patches for patch in group):
        setattr(target, name, function)


Patches = list[tuple[Any, str, Callable[..., Any]]]


def _launches(interpreter: Any, language: Any) -> Patches:
    """_patch_lang replaces the language's functions at a launch, and again whenever a kernel calls a function.

    The second time changes nothing. The replacements do not depend on the launch, so they are made once.
    """
    patch, scopes = interpreter._patch_lang, interpreter._LangPatchScope
    shared = interpreter.interpreter_semantic
    patched: set[int] = set()  # ids of the language modules that are replaced now
    changes: dict[frozenset[int], list[tuple[Any, str, Any]]] = {}

    @functools.cache
    def modules(function: Callable[..., Any]) -> frozenset[int]:
        return frozenset(id(x) for x in function.__globals__.values() if x is language or x is language.core)

    def patch_once(function: Callable[..., Any]) -> Any:
        new = modules(function) - patched
        if not new:
            return _Patched(None, patched, new)
        if patched or new not in changes:
            scope = patch(function)
            if not patched:
                changes[new] = [(target, name, vars(target)[name]) for target, name, _ in scope._changes]
        else:
            scope = scopes()
            for target, name, value in changes[new]:
                scope.set_attr(target, name, value)
        patched.update(new)
        return _Patched(scope, patched, new)

    def replace_builtin(target: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        call = getattr(member, "__wrapped__", member)  # the wrapper only checks that _semantic is given

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = shared
            return call(*args, **kwargs)

        scope.set_attr(target, name, interpreted)

    return [(interpreter, "_patch_lang", patch_once), (interpreter, "_patch_attr", replace_builtin)]


class _Patched:
    """Restores the language at the end of a launch."""

    def __init__(self, scope: Any, patched: set[int], new: frozenset[int]):
        self.scope, self.patched, self.new = scope, patched, new

    def restore(self) -> None:
        if self.scope is not None:
            self.scope.restore()
            self.patched -= self.new


def _types(core: Any) -> Patches:
    """What is derived from a shape is computed once per shape; what a tensor takes from its type, once per type."""
    dtype, block_type, tensor, constexpr = core.dtype, core.block_type, core.tensor, core.constexpr
    new_block, new_tensor, unwrap = block_type.__init__, tensor.__init__, core._unwrap_if_constexpr
    with_element, equal = block_type.with_element_ty, dtype.__eq__
    shapes: dict[tuple[int, ...], tuple[Any, int, str, Any]] = {}
    plain = frozenset((int, float, bool, str, type(None), tensor, dtype, block_type, core.pointer_type))

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if type(shape) is core.tuple else shape
        key = tuple([x.value if type(x) is constexpr else x for x in sizes])
        known = shapes.get(key)
        if known is None:
            new_block(self, element_ty, shape)
            new_tensor(made := tensor.__new__(tensor), None, self)
            shapes[key] = (self.shape, self.numel, str(self.shape), (made.shape, made.numel))
            self._of_tensors = shapes[key][3]
            return
        self.element_ty = element_ty
        self.shape, self.numel, text, self._of_tensors = known
        self.name = f"<{text}, {element_ty}>"

    def with_element_once(self: Any, scalar: Any) -> Any:
        key = (scalar.name, scalar.address_space) if type(scalar) is core.pointer_type else scalar.name
        made = self.__dict__.setdefault("_with_element", {})
        if key not in made:
            made[key] = with_element(self, scalar)
        return made[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("_of_tensors")
        if known is None:
            new_tensor(self, handle, type)
            type._of_tensors = (self.shape, self.numel)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    def unwrap_constexpr(x: Any) -> Any:
        kind = type(x)
        return x if kind in plain else x.value if kind is constexpr else unwrap(x)

    def equal_or_same(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    def named(names: list[str]) -> Callable[[Any], bool]:
        set_of_names = frozenset(names)
        return lambda self: self.name in set_of_names

    return [
        (block_type, "__init__", init_block),
        (block_type, "with_element_ty", with_element_once),
        (tensor, "__init__", init_tensor),
        (core, "_unwrap_if_constexpr", unwrap_constexpr),
        (dtype, "__eq__", equal_or_same),
        (dtype, "is_int", named(dtype.SINT_TYPES + dtype.UINT_TYPES)),
        (dtype, "is_floating", named(dtype.FP_TYPES)),
        (dtype, "is_int_signed", named(dtype.SINT_TYPES)),
        (dtype, "is_int_unsigned", named(dtype.UINT_TYPES)),
    ]


def _handles(interpreter: Any, core: Any) -> Patches:
    """An array's item size is checked without a call per attribute; the table of dtypes is made once."""
    handle, to_numpy = interpreter.TensorHandle, interpreter._get_np_dtype
    init = handle.__init__
    numpys: dict[str, Any] = {}

    def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        bits = dtype.__dict__.get("primitive_bitwidth", 0)
        if attr is None and bits and data.itemsize * 8 <= (bits if bits > 8 else 8):
            self.data, self.dtype, self.attr = data, dtype, {}
        else:
            init(self, data, dtype, {} if attr is None else attr)

    def dtype_once(of: Any) -> Any:
        name = of.scalar.name  # a block's name holds its shape, that of its elements does not
        if name not in numpys:
            numpys[name] = to_numpy(of)
        return numpys[name]

    return [(handle, "__init__", init_handle), (interpreter, "_get_np_dtype", dtype_once)]


def _operands(semantic: Any, interpreter: Any, core: Any) -> Patches:
    """Operands of equal types are returned at once. For others, the type to cast to is looked up."""
    from numpy import array, empty

    tensor, block_type, dtype, pointer = core.tensor, core.block_type, core.dtype, core.pointer_type
    check, broadcast, constant = (
        semantic.binary_op_type_checking_impl,
        semantic.broadcast_impl_value,
        semantic.scalar_constant,
    )
    cast, compute = semantic.cast, semantic.computation_type_impl
    handle = interpreter.TensorHandle
    types: dict[tuple[Any, ...], Any] = {}
    shapes: dict[tuple[int, ...], list[int]] = {}
    narrow = ("fp16", "bf16")  # their quotients are computed in float32
    constants = frozenset(
        ("int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "fp16", "fp32", "fp64")
    )

    def cast_or_same(input: Any, dst_ty: Any, *rounding: Any, **rounding_by_name: Any) -> Any:
        if input.dtype is dst_ty.scalar:
            return input
        return cast(input, dst_ty, *rounding, **rounding_by_name)

    def computation_type(a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
        if key not in types:
            types[key] = compute(a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return types[key]

    def scalar_constant(value: Any, dtype: Any) -> Any:
        if dtype is None or dtype.name not in constants:
            return constant(value, dtype)
        return tensor(handle(array([0 if value == 0 else value], dtype=interpreter._get_np_dtype(dtype)), dtype), dtype)

    def operands(
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if type(lhs) is tensor:
            a = lhs.dtype
            if type(rhs) is tensor:
                b = rhs.dtype
                if type(a) is dtype and type(b) is dtype:
                    if a.name == b.name:
                        if not (div_or_mod and a.name in narrow):
                            return broadcast_or_same(lhs, rhs)
                    elif arithmetic_check:
                        common = computation_type(a, False, b, False, div_or_mod)
                        return broadcast_or_same(cast_or_same(lhs, common), cast_or_same(rhs, common))
                elif allow_lhs_ptr and type(a) is pointer and type(b) is dtype and b.is_int():
                    return broadcast_or_same(lhs, rhs)
            elif arithmetic_check and type(a) is dtype and type(rhs) in (int, float, bool):
                key = (a.name, type(rhs), rhs, div_or_mod)
                if key in types:  # whether a number fits a type depends on both alone
                    common = types[key]
                    return broadcast_or_same(cast_or_same(lhs, common), scalar_constant(rhs, common))
                result = check(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
                types[key] = result[1].dtype
                return result
        return check(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def fill(value: Any, numpy_type: Any, type: Any) -> Any:
        data = empty(type.shape.values, numpy_type)
        data[...] = value.handle.data
        return tensor(handle(data, value.handle.dtype.scalar), type)

    def splat(value: Any, like: Any) -> Any:
        return fill(value, interpreter._get_np_dtype(value.handle.dtype), like.with_element_ty(value.dtype))

    def broadcast_or_same(lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if type(a) is not block_type:
            return (splat(lhs, b), rhs) if type(b) is block_type else (lhs, rhs)
        if type(b) is not block_type:
            return lhs, splat(rhs, a)
        if a.shape is b.shape:
            return lhs, rhs
        from_a, from_b = a.shape.values, b.shape.values
        if from_a == from_b:
            return lhs, rhs
        key = (*from_a, 0, *from_b)
        if key not in shapes:
            result = broadcast(lhs, rhs)
            shapes[key] = result[0].type.shape.values
            return result
        to = shapes[key]
        if len(from_a) != len(from_b):
            return broadcast(lhs, rhs)
        if from_a != to:
            lhs = fill(lhs, lhs.handle.data.dtype, block_type(a.element_ty, to))
        if from_b != to:
            rhs = fill(rhs, rhs.handle.data.dtype, block_type(b.element_ty, to))
        return lhs, rhs

    return [
        (semantic, "cast", cast_or_same),
        (semantic, "scalar_constant", scalar_constant),
        (semantic, "computation_type_impl", computation_type),
        (semantic, "binary_op_type_checking_impl", operands),
        (semantic, "broadcast_impl_value", broadcast_or_same),
    ]


def _builder(builder: Any, interpreter: Any, core: Any) -> Patches:
    """Block types are made once. The check for overflow is left out: Triton computes it and drops its assertion."""
    dtype, get_block, options, handle = core.dtype, builder.get_block_ty, builder.options, interpreter.TensorHandle
    blocks: dict[tuple[Any, ...], Any] = {}
    if not options.debug:
        builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

    def block_once(element: Any, shape: Any) -> Any:
        if type(element) is not dtype:
            return get_block(element, shape)
        key = (element.name, *shape)
        if key not in blocks:
            blocks[key] = get_block(element, shape)
        return blocks[key]

    def expand_dims(arg: Any, axis: int) -> Any:
        shape = [*arg.data.shape]
        shape.insert(axis if axis >= 0 else axis + len(shape) + 1, 1)
        return handle(arg.data.reshape(shape), arg.dtype.scalar)

    return [(builder, "get_block_ty", block_once), (builder, "create_expand_dims", expand_dims)]

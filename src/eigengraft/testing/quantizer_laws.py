"""The laws of quantizers, on a slot that the quantizer can store: a statistic, a basis or a second moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eigengraft.quantization import Quantizer
from eigengraft.slots import Encoded, Role, Slot, Uniform

from .accelerator import accelerator
from .causes import WATCHED_BLOCKS, casts_of_nan, overflow_cause, stack_cause, write_cause
from .device_laws import require_no_waits, without_accelerator
from .laws import Case, Law, LawError, broken, in_parentheses, require, require_close, the_declaration_survives
from .samples import standard_normal

_FLOAT32 = torch.float32
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class QuantizerCase(Case[Quantizer]):
    """A quantizer under test.

    size: order d of the matrices `[d, d]` to try. A quantizer that refuses small slots needs a larger number.
    """

    size: int = 9

    def example(self, blocks: int = 4) -> tuple[Slot, Tensor]:
        """Return the declaration of a square matrix that the quantizer can store, and such matrices, float32
        `[blocks, d, d]`.

        Raises LawError if the quantizer refuses matrices of all roles.
        """
        d = self.size
        x = standard_normal(blocks, d, 2 * d, seed=0)
        matrices: dict[Role, Callable[[], Tensor]] = {
            "statistic": lambda: x @ x.mT / d,
            "basis": lambda: torch.linalg.qr(x[..., :d]).Q,
            "second_moment": lambda: x[..., :d].square(),
        }
        problem = None
        for role, make in matrices.items():
            slot = Slot((d, d), role=role)
            problem = self.component.unsupported(slot)
            if problem is None:
                return slot, make().float()
        raise LawError(
            f"unsupported() refuses slots of shape {(d, d)} in each of the roles {', '.join(matrices)}, so that "
            "nothing can be checked; return None for at least one role, or pass a larger `size` to check_quantizer if "
            f"the quantizer needs larger matrices (reason given for {role}: {problem})",
            law="slots of at least one role are accepted",
        )

    def examples(self, blocks: int = 4) -> Iterator[tuple[str, Slot, Tensor]]:
        """Yield (text, slot, x): declarations of state tensors (slots) that the quantizer accepts, and values to store.

        The values x are float32, `[blocks, *slot.shape]`. The first are the matrices of `example`. The others have
        other shapes, such as one number for each block. The text is appended to names in errors: it names the shape,
        and is "" for the matrices.
        """
        yield "", *self.example(blocks)
        roles: tuple[Role, ...] = ("second_moment", "first_moment")
        for shape in ((), (self.size,), (3, self.size, 2)):
            slots = (Slot(shape, role=role) for role in roles)
            slot = next((slot for slot in slots if self.component.unsupported(slot) is None), None)
            if slot is not None:
                yield f" (of a slot of shape {shape})", slot, standard_normal(blocks, *shape, seed=1).square().float()


def storage_note(case: QuantizerCase) -> str:
    """Return a sentence about the bytes and the error of a stored matrix of order 64.

    Small matrices would take more bytes for each number, because scales are stored too. The matrix has order
    `case.size` if that is larger, or if the quantizer refuses matrices of order 64.
    """
    try:
        slot, x = replace(case, size=max(case.size, 64)).example(1)
    except LawError:
        slot, x = case.example(1)
    encoded = case.component.encode(x)
    stored = sum(part.nbytes for part in encoded.values()) / x.numel()
    error = float((case.component.decode(encoded, slot, x.dtype) - x).norm() / x.norm())
    what = f"a {slot.role.replace('_', ' ')} of {' x '.join(map(str, slot.shape))}"
    return f"{what} takes {stored:.3g} bytes per number, with a relative error of {error:.2g}"


def _nearly_one(like: Tensor, purpose: str) -> Tensor:
    return torch.full_like(like, 1 - 2**-24)


def parts_are_plain_tensors_with_a_leading_axis(case: QuantizerCase) -> None:
    """The stored tensors are `[N, ...]` and contiguous; their names, dtypes and shapes do not depend on the values in
    the slot.
    """
    for name, slot, x in case.examples():
        try:
            found: object = case.component.encode(x)
        except Exception as error:
            if name:
                error.add_note(f"for a slot of shape {slot.shape}, which `unsupported` does not refuse")
            raise
        require(isinstance(found, Mapping), "encode()", "a mapping {name: tensor}", type(found).__name__)
        one, two = case.component.encode(x), case.component.encode(x.flip(0) * 3, case.component.encode(x))
        require(len(one) > 0, "encode()", "at least one part", "none")
        for part_name, part in one.items():
            what = f"part '{part_name}'{name}"
            fine = type(part) is Tensor and part.ndim > 0 and len(part) == len(x)
            remedy = in_parentheses(_NEEDS_AXES) if x.ndim == 1 else ""
            require(fine, what, f"a plain tensor of shape [{len(x)}, ...]", _short(part), remedy)
            remedy = in_parentheses("return it `.contiguous()`")
            require(part.is_contiguous(), what, "contiguous memory", f"strides {part.stride()}", remedy)
        want = {key: (part.dtype, part.shape) for key, part in one.items()}
        got = {key: (part.dtype, part.shape) for key, part in two.items()}
        what = f"(dtype, shape) of the parts that encode() returns, given parts `before`{name}"
        require(got == want, what, f"{want}, as without `before`", got)


_NEEDS_AXES = (
    "does encode() need an axis besides axis 0, the stack? Then `unsupported` must return a reason for slots without "
    "axes"
)


def shape_and_dtype_come_back(case: QuantizerCase) -> None:
    """Decoded tensors have the requested dtype, the shape of the slot, and memory of their own."""
    for name, slot, x in case.examples():
        for dtype in _DTYPES:
            parts = case.component.encode(x.to(dtype))
            before = _copies(parts)
            y = case.component.decode(parts, slot, dtype)
            want, got = (dtype, tuple(x.shape)), (y.dtype, tuple(y.shape))
            require(got == want, f"decode(), (dtype, shape){name}", f"{want}", got)
            y.fill_(7.0)
            require(_same(parts, before), "decode()", "a tensor with memory of its own", "a view of the parts")


def nothing_given_is_written_to(case: QuantizerCase) -> None:
    """`encode` changes neither the numbers nor the tensors `before` that it receives. `decode` changes no tensor that
    it receives.
    """
    slot, x = case.example()
    copy, before = x.clone(), case.component.encode(x.flip(0))
    old = _copies(before)
    parts = case.component.encode(x, before, _nearly_one)
    if not torch.equal(x, copy):
        cause = write_cause(case.component, {"x": x}, lambda: case.component.encode(x, before, _nearly_one))
        raise broken("the input x after encode()", "no change", "other numbers", cause)
    require(_same(before, old), "the parts `before` after encode()", "no change", "other numbers")
    new = _copies(parts)
    case.component.decode(parts, slot, _FLOAT32)
    require(_same(parts, new), "the parts after decode()", "no change", "other numbers")


def the_same_numbers_have_the_same_codes(case: QuantizerCase) -> None:
    """The encoding depends only on the values in the slot, and not on the strides of the tensor."""
    _, x = case.example()
    strided = torch.stack((x, -x), -1)[..., 0]
    one, two, three = case.component.encode(x), case.component.encode(x.clone()), case.component.encode(strided)
    require(_same(one, two), "parts of the same numbers", "the same bits", "other bits")
    require(_same(one, three), "parts of the same numbers with other strides", "the same bits", "other bits")


def blocks_are_coded_one_by_one(case: QuantizerCase) -> None:
    """A block is decoded to the same numbers in a stack and alone, also if the other blocks are 1e8 times as large. The
    tolerance is 1e-5, because encoding may compute products and eigenvectors.
    """
    for place, (name, slot, x) in enumerate(case.examples()):
        sizes = torch.tensor([1.0, 1e-8, 1.0, 1e-4]).reshape(-1, *[1] * len(slot.shape))
        for stack in (x, x if slot.role == "basis" else x * sizes):
            _require_row_by_row(case, place, name, slot, stack)


def _require_row_by_row(case: QuantizerCase, place: int, name: str, slot: Slot, x: Tensor) -> None:
    stacked = case.component.encode(x)
    everything = case.component.decode(stacked, slot, _FLOAT32)

    def cause() -> str:
        many = list(case.examples(WATCHED_BLOCKS))[place][2]
        return stack_cause(case.component, lambda: case.component.decode(case.component.encode(many), slot, _FLOAT32))

    for i in range(len(x)):
        row = {key: part[i : i + 1] for key, part in stacked.items()}
        decoded = case.component.decode(row, slot, _FLOAT32)[0]
        require_close(decoded, everything[i], 1e-5, f"block {i} decoded alone and in its stack{name}", cause)
        alone = case.component.decode(case.component.encode(x[i : i + 1]), slot, _FLOAT32)[0]
        require_close(alone, everything[i], 1e-5, f"block {i} encoded alone and in its stack{name}", cause)


def only_zero_matrices_are_decoded_as_zero(case: QuantizerCase) -> None:
    """In a stack of a zero matrix and other matrices, only the zero matrix is decoded as zero.

    This holds for rounding to nearest and for stochastic rounding, and also if other numbers were stored before.
    """
    for name, slot, x in case.examples():
        zero = x.clone()
        zero[2] = 0.0
        for uniform in _UNIFORMS:
            for before in (None, case.component.encode(x)):
                y = case.component.decode(case.component.encode(zero, before, uniform), slot, _FLOAT32)
                require(y.isfinite().all(), f"decoded blocks{name}", "finite numbers", "nan or inf")
                largest = f"up to {float(y[2].abs().max()):.2g}"
                require(not y[2].any(), f"a decoded block of zeros{name}", "0", largest)
                beside = bool(y[[0, 1, 3]].reshape(3, -1).any(1).all())
                require(beside, f"decoded blocks beside a block of zeros{name}", "numbers other than 0", "zeros")


_UNIFORMS: tuple[Uniform | None, ...] = (None, _nearly_one)


def codes_are_made_from_finite_numbers(case: QuantizerCase) -> None:
    """No nan or inf is converted to an integer if all numbers are finite, also for blocks and rows of zeros. Such a
    conversion gives another integer on another device.
    """
    for name, _, x in case.examples():
        zero = x.clone()
        zero[2] = 0.0
        if x.ndim > 1:
            zero[1, 0] = 0.0
        for uniform in _UNIFORMS:
            for before in (None, case.component.encode(x)):
                casts = casts_of_nan(case.component, lambda: case.component.encode(zero, before, uniform))  # noqa: B023
                cause = in_parentheses("is 0 divided by 0? divide where the scale is not 0, by torch.where")
                what = f"numbers that encode() converts to integers, for a block or row of zeros{name}"
                require(not casts, what, "finite numbers", f"nan or inf in {casts[0]}" if casts else "", cause)


def nan_and_inf_are_decoded_or_not_stored(case: QuantizerCase) -> None:
    """A matrix with an entry that is not finite is decoded with such an entry, or as the matrix that was stored before.
    Other matrices are not affected.
    """
    slot, x = case.example()
    for value in (torch.nan, torch.inf, -torch.inf):
        for i, j in ((3, 3), (5, 2)):
            bad = x.clone()
            bad[1, i, j] = bad[1, j, i] = value
            for before in (None, case.component.encode(x.flip(0))):
                good, spoiled = (
                    case.component.decode(case.component.encode(y, before), slot, _FLOAT32) for y in (x, bad)
                )
                same = torch.equal(good[[0, 2, 3]], spoiled[[0, 2, 3]])
                what = f"decoded blocks 0, 2 and 3 of a stack with {value} in block 1"
                require(same, what, f"the same bits as without {value}", "other bits")
                kept = torch.zeros_like(x) if before is None else case.component.decode(before, slot, _FLOAT32)
                seen = not bool(spoiled[1].isfinite().all()) or torch.equal(spoiled[1], kept[1])
                what = f"decode(encode(x)) for a block x with {value}"
                expected = "an entry that is not finite, or the block stored before"
                require(seen, what, expected, "other numbers", _KEEPS_NAN)


_KEEPS_NAN = in_parentheses(
    "encode() loses nan and inf, as a cast to integers or nan_to_num() does; store a scale such as x.abs().amax(), "
    "which is then nan or inf too, and multiply by it in decode()"
)


def decoded_numbers_are_near_the_originals(case: QuantizerCase) -> None:
    """The relative error of a decoded matrix is at most 1/2 in the Frobenius norm, for any format. If the decoded
    matrix is encoded and decoded again, the second error is at most 3/4 of the first, because a code can represent a
    decoded number almost exactly.

    The second bound finds a `decode` that multiplies by a wrong scale, and does so again the second time. It is raised
    by 1e-5 for the rounding errors of formats that are exact otherwise. In a coarse format, rounding may hide the error
    of a scale. A third bound finds it: the mean factor between numbers and decoded numbers is between 1/1.05 and 1.05.
    """
    slot, x = case.example()
    y = case.component.decode(case.component.encode(x), slot, _FLOAT32)
    z = case.component.decode(case.component.encode(y), slot, _FLOAT32)
    size = x.flatten(1).norm(dim=1)
    first, second = ((after - before).flatten(1).norm(dim=1) / size for before, after in ((x, y), (y, z)))
    if not (worst := float(first.max())) <= 0.5:
        cause = _cause_of_errors(case, x, y)
        raise broken("the relative error of a decoded block", "at most 0.5", f"{worst:.2g}", cause)
    place = int((second - 0.75 * first).argmax())
    require(
        second[place] <= 0.75 * first[place] + 1e-5,
        "the relative error of a decoded block after it is encoded and decoded again",
        f"at most {float(0.75 * first[place]):.2g}, 3/4 of the error of the first time",
        f"{float(second[place]):.2g}",
        in_parentheses(_OTHER_SCALE),
    )
    _require_scale(case)


_OTHER_SCALE = "does decode() multiply by the number by which encode() divides?"


def _require_scale(case: QuantizerCase) -> None:
    """Raise a LawError if <x, y> exceeds 1.05 <x, x> or 1.05 <y, y>, with sums over the entries of 64 matrices x.

    y are the decoded matrices of x. The same is required with y in place of x, and with the decoded matrices of y in
    place of y. The quotients <x, y> / <x, x> and <x, y> / <y, y> are 1 or less however coarse a format is. Errors that
    do not depend on x only enlarge <y, y>. A format that decodes a code to the mean of its interval has <x, y> = <y,
    y>. A wrong scale enlarges one of the quotients.
    """
    slot, x = case.example(64)
    y = case.component.decode(case.component.encode(x), slot, _FLOAT32)
    z = case.component.decode(case.component.encode(y), slot, _FLOAT32)
    for before, after, name in ((x, y, "decoded numbers"), (y, z, "decoded numbers that are coded again")):
        product = float((before * after).sum())
        for numbers, change in ((before, "enlarged"), (after, "reduced")):
            factor = product / float(numbers.square().sum())
            what = f"the factor by which {name} are {change}"
            require(factor <= 1.05, what, "at most 1.05", f"{factor:.3g}", in_parentheses(_OTHER_SCALE))


def _cause_of_errors(case: QuantizerCase, x: Tensor, y: Tensor) -> str:
    """Return the probable reason why decoded numbers y are far from x, in parentheses; "" if none is found."""
    if cause := overflow_cause(case.component, lambda: case.component.encode(x)):
        return cause
    near = 0.5 * x.norm()
    if (y.abs() - x.abs()).norm() <= near:
        return in_parentheses("decoded numbers have wrong signs, but right sizes; does encode() store the sign?")
    scaled = y * ((x * y).sum() / y.square().sum().clamp_min(1e-30))
    return in_parentheses(_OTHER_SCALE) if (scaled - x).norm() <= near else ""


def errors_have_no_common_sign(case: QuantizerCase) -> None:
    """The errors of decoded numbers do not all have the same sign, and do not all point toward 0 or away from 0.

    e is the error of an entry x. The means of e and of e sign(x) over 64 matrices are at most 0.6 of the root mean
    square of e. Rounding to nearest gives about 0, and 0.5 for formats of few codes. Rounding down, or toward 0, gives
    0.87, because such an error is uniform between 0 and one step.
    """
    slot, x = case.example(64)
    error = case.component.decode(case.component.encode(x), slot, _FLOAT32) - x
    size = float(error.square().mean().sqrt())
    for signs, name, cause in (
        (torch.ones_like(x), "the mean error of decoded numbers", "does encode() round down or up?"),
        (
            x.sign(),
            "the mean error of decoded numbers, each error times the sign of its number",
            "does encode() round toward 0?",
        ),
    ):
        mean = float((error * signs).mean())
        expected = f"at most {0.6 * size:.2g} in absolute value, 0.6 of the root mean square of the error"
        require(abs(mean) <= 0.6 * size, name, expected, f"{mean:.2g}", in_parentheses(cause))


def draws_average_out(case: QuantizerCase) -> None:
    """Stochastic rounding has no bias: the mean of 32 decoded matrices, each with other random numbers, has at most 3/4
    of the error of one of them. Without bias it has 1 / sqrt(32) = 0.18 of this error.
    """
    slot, x = case.example()
    parts = [case.component.encode(x, None, _draws(seed)) for seed in range(32)]
    ys = torch.stack([case.component.decode(own, slot, _FLOAT32) for own in parts])
    one, mean = float((ys - x).square().flatten(1).sum(1).mean().sqrt()), float((ys.mean(0) - x).norm())
    what = "the error of the mean of 32 stochastic roundings"
    if not mean <= 0.75 * one:
        cause = overflow_cause(case.component, lambda: case.component.encode(x, None, _draws(0)))
        raise broken(what, f"at most {0.75 * one:.2g}, 3/4 of the error of one", f"{mean:.2g}", cause)


def _draws(seed: int) -> Uniform:
    """Return a function that draws random numbers for stochastic rounding.

    seed: number from which the random numbers follow.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(like: Tensor, purpose: str) -> Tensor:
        return torch.rand(like.shape, generator=generator, dtype=like.dtype, device="cpu").to(like.device)

    return uniform


def without_draws(case: QuantizerCase) -> str | None:
    """Return the reason to skip `draws_average_out`, or None if it applies. It does not apply to a quantizer that
    draws no random numbers, or in which an inner quantizer draws them. In the second case only the decoded tensors of
    the inner quantizer have an exact mean, and the matrix may be a nonlinear function of these tensors.
    """
    if any(isinstance(value, Quantizer) for _, value in case.component):
        return "the quantizer inside draws the random numbers"
    asked = list[str]()

    def uniform(like: Tensor, purpose: str) -> Tensor:
        asked.append(purpose)
        return torch.zeros_like(like)

    case.component.encode(case.example()[1], None, uniform)
    return None if asked else "encode() draws no random numbers, so that it always rounds in the same way"


def codes_stay_on_the_device(case: QuantizerCase) -> None:
    """The host neither waits for the device nor copies numbers to it, when a slot is encoded and decoded for the second
    time.

    The first encoding and decoding are not checked, because they may copy codebooks to the device.
    """
    with accelerator("cuda") as run:
        slot, host = case.example()
        x = host.to(run.device)
        parts = case.component.encode(x)
        case.component.decode(parts, slot, _FLOAT32)  # may copy codebooks
        with accelerator("cuda") as counts:
            parts = case.component.encode(x, parts, _nearly_one)
            case.component.decode(parts, slot, _FLOAT32)
        remedy = "keep numbers such as a largest entry as tensors, without item() or `if`"
        require_no_waits(counts, "encode() and decode()", remedy)


def _copies(parts: Encoded) -> dict[str, Tensor]:
    return {name: part.clone() for name, part in parts.items()}


def _same(one: Encoded, two: Encoded) -> bool:
    return one.keys() == two.keys() and all(torch.equal(part, two[name]) for name, part in one.items())


def _short(part: object) -> str:
    return f"{type(part).__name__} of shape {list(part.shape)}" if isinstance(part, Tensor) else type(part).__name__


QUANTIZER_LAWS: tuple[Law[QuantizerCase], ...] = (
    Law(the_declaration_survives),
    Law(parts_are_plain_tensors_with_a_leading_axis, decisive=True),
    Law(shape_and_dtype_come_back),
    Law(nothing_given_is_written_to, decisive=True),
    Law(the_same_numbers_have_the_same_codes),
    Law(blocks_are_coded_one_by_one),
    Law(only_zero_matrices_are_decoded_as_zero),
    Law(codes_are_made_from_finite_numbers),
    Law(nan_and_inf_are_decoded_or_not_stored),
    Law(decoded_numbers_are_near_the_originals),
    Law(errors_have_no_common_sign),
    Law(draws_average_out, without_draws),
    Law(codes_stay_on_the_device, without_accelerator),
)

"""Defects in the pack's own code, to be put in on purpose: a table of mutants, and what makes them.

tests/studies/code_mutants.py says which tests notice each. A mutant says where it is by its text, which kernels/ and
nodes/ hold exactly once: files may move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOMS = ("kernels", "nodes")


@dataclass(frozen=True)
class CodeMutant:
    """A defect.

    Attributes:
        breaks: what does not work any more, in words.
        text: what stands in the code.
        replacement: what stands there instead.
        candidates: the tests that should notice it, as pytest takes them, under tests/; separated by spaces.
    """

    breaks: str
    text: str
    replacement: str
    candidates: str

    def place(self, sources: Mapping[Path, str]) -> Path:
        """The file that holds the text. Raises ValueError unless it is there exactly once."""
        counts = {path: count for path, text in sources.items() if (count := text.count(self.text))}
        if list(counts.values()) != [1]:
            where = ", ".join(f"{count} x in {path}" for path, count in counts.items()) or "nowhere"
            raise ValueError(
                f"the text of the mutant {self.breaks!r} must be in the code once, and is there {where}: give it "
                "another in tests/support/code_mutants.py"
            )
        return next(iter(counts))

    def applied(self, source: str) -> str:
        """The file's text with the defect."""
        return source.replace(self.text, self.replacement)


def sources(project: Path) -> dict[Path, str]:
    """The code that mutants are made of, by its path in the project."""
    files = (path for room in ROOMS for path in sorted((project / room).rglob("*.py")))
    return {path.relative_to(project): path.read_text(encoding="utf-8") for path in files}


_LINEAR = (
    CodeMutant(
        "the kernel scales a column by another column's weight scale",
        "tl.load(b_scale + columns, mask=columns < N, other=0.0)[None, :]",
        "tl.load(b_scale + (columns ^ 1), mask=(columns ^ 1) < N, other=0.0)[None, :]",
        "kernels/test_int8_gemm.py::test_epilogue_against_float64",
    ),
    CodeMutant(
        "the kernel loses the bias",
        "result += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]",
        "result += 0.0",
        "kernels/test_int8_gemm.py::test_epilogue_against_float64",
    ),
    CodeMutant(
        "the reference loses the bias",
        "out = out + bias.float()",
        "pass",
        "nodes/test_loading.py::test_a_native_file_computes_what_stock_comfyui_computes",
    ),
    CodeMutant(
        "the kernel reads one channel behind the row",
        "in_row = k_offsets[None, :] < K - start",
        "in_row = k_offsets[None, :] <= K - start",
        "kernels/test_int8_gemm.py::test_accumulator_is_bit_exact",
    ),
    CodeMutant(
        "a part of a split K ends a block too early",
        "end = (blocks * (tl.program_id(1) + 1) // SPLIT_K) * BLOCK_K",
        "end = (blocks * (tl.program_id(1) + 1) // SPLIT_K - 1) * BLOCK_K",
        "kernels/test_int8_gemm.py::test_k_shared_by_several_programs",
    ),
    CodeMutant(
        "the last but one of several splits sums them all",
        'tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT_K - 1',
        'tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT_K - 2',
        "kernels/test_int8_gemm.py::test_k_shared_by_several_programs",
    ),
    CodeMutant(
        "the first walk over K reads the steps, and not the remainders",
        "a_tile += K\n",
        "a_tile += 0\n",
        "kernels/test_16_bit_activations.py",
    ),
    CodeMutant(
        "sums over remainders are cut off, and not rounded",
        "return (remainders + halves) // _REMAINDER_STEPS",
        "return remainders // _REMAINDER_STEPS",
        "kernels/test_16_bit_activations.py",
    ),
    CodeMutant(
        "the kernel takes the activations' rows to lie side by side",
        "stride_am + (a_rows[:, None] * stride_am + k_offsets[None, :])",
        "stride_am + (a_rows[:, None] * K * PASSES + k_offsets[None, :])",
        "kernels/test_int8_gemm.py::test_strided_operands kernels/test_16_bit_activations.py",
    ),
    CodeMutant(
        "groups of tile rows go beyond the last one",
        "group_rows = tl.minimum(tiles_m - first_m, GROUP_M)",
        "group_rows = GROUP_M",
        "kernels/test_int8_gemm.py::test_accumulator_is_bit_exact",
    ),
    CodeMutant(
        "the reference forgets the channels before the last slice",
        "accumulator += (q_slice.float() @ w_slice.float().t()).to(torch.int32)",
        "accumulator = (q_slice.float() @ w_slice.float().t()).to(torch.int32)",
        "kernels/test_int8_gemm.py::test_the_reference_is_exact_for_many_channels",
    ),
    CodeMutant(
        "no channels give zeros, and not the bias",
        "return empty_sum if bias is None else empty_sum.add_(bias.detach().to(out_dtype))",
        "return empty_sum",
        "kernels/test_int8_gemm.py::test_no_channels_gives_the_bias",
    ),
    CodeMutant(
        "an input with more channels than the weight is not refused",
        "    if x.shape[-1] != weight.shape[1]:\n",
        "    if x.shape[-1] < weight.shape[1]:\n",
        "kernels/test_repeated_linear.py::test_errors_are_those_of_the_linear",
    ),
    CodeMutant(
        "a gradient is lost in silence",
        "if activations.requires_grad and torch.is_grad_enabled():",
        "if activations.requires_grad and not torch.is_grad_enabled():",
        "kernels/test_int8_gemm.py::test_gradient_is_refused",
    ),
    CodeMutant(
        "scales in float16 are taken for float32",
        "if q_scale.dtype != torch.float32:",
        "if not q_scale.is_floating_point():",
        "kernels/test_int8_gemm.py::test_bad_arguments_are_named",
    ),
    CodeMutant(
        "a linear called again takes the launch of a bias in another dtype",
        "None if bias is None else bias.dtype",
        "bias is None",
        "kernels/test_repeated_linear.py::test_what_a_compiled_kernel_would_read_wrong_goes_the_long_way",
    ),
    CodeMutant(
        "a launch compiled for 16 bytes is used for tensors that begin elsewhere",
        "return tuple([pointer % 16 == 0 for pointer in pointers]) if together % 16 else None",
        "return None",
        "kernels/test_launching.py",
    ),
    CodeMutant(
        "a launch compiled for a stride of 1 is used for others",
        "((number == 1, number % 16 == 0, number < 2**31) for number in numbers)",
        "((number % 16 == 0, number < 2**31) for number in numbers)",
        "kernels/test_launching.py",
    ),
)

_ACTIVATIONS = (
    CodeMutant(
        "the reciprocal of a tiny row's scale becomes Inf",
        "inverse_scale = tl.minimum(tl.div_rn(127.0, tl.where(absmax > 0, absmax, 1.0)), _FLOAT32_MAX)",
        "inverse_scale = tl.div_rn(127.0, tl.where(absmax > 0, absmax, 1.0))",
        "kernels/test_quantization.py::test_tiny_and_huge_rows",
    ),
    CodeMutant(
        "the reference's reciprocal of a tiny row's scale becomes Inf",
        "torch.where(absmax > 0, absmax, 1.0)).clamp(max=_FLOAT32_MAX)",
        "torch.where(absmax > 0, absmax, 1.0))",
        "kernels/test_quantization.py::test_tiny_and_huge_rows",
    ),
    CodeMutant(
        "a row with an Inf gets the scale Inf",
        'tl.store(scale, tl.where(broken, float("nan"), tl.div_rn(absmax, 127.0)))',
        "tl.store(scale, tl.div_rn(absmax, 127.0))",
        "kernels/test_int8_gemm.py::test_non_finite_row_stays_in_its_row",
    ),
    CodeMutant(
        "the kernel rounds halves up, and not to even",
        "rounded = steps + ROUND_TO_EVEN",
        "rounded = tl.floor(steps + 0.5) + ROUND_TO_EVEN",
        "kernels/test_quantization.py",
    ),
    CodeMutant(
        "the reference cuts off",
        "    q = steps.round()\n",
        "    q = steps.trunc()\n",
        "kernels/test_quantization.py",
    ),
    CodeMutant(
        "rotation by another matrix, which is its own inverse too",
        "quads.sum(-1, keepdim=True) - 2 * quads.flip(-1)",
        "quads.sum(-1, keepdim=True) - 2 * quads",
        "kernels/test_quantization.py::test_rotation_is_the_regular_hadamard_matrix",
    ),
    CodeMutant(
        "the kernel leaves out a rotation's last digit",
        "if (4 << digit) <= GROUP:",
        "if (4 << digit) < GROUP:",
        "kernels/test_quantization.py",
    ),
    CodeMutant(
        "smoothing factors are ignored for activations",
        "values = values * self.smooth.float().reciprocal()",
        "values = values * 1.0",
        "kernels/test_transform.py",
    ),
    CodeMutant(
        "the kernel multiplies by smoothing factors, and does not divide",
        "values *= reciprocal(factors, INTERPRETED)",
        "values *= factors",
        "kernels/test_quantization.py::test_smoothing_alone kernels/test_quantization.py",
    ),
    CodeMutant(
        "rotation comes before smoothing",
        "values = x.float()\n        if self.smooth is not None:",
        "values = x.float() if self.rotation_group is None else rotate(x.float(), self.rotation_group)\n"
        "        if self.smooth is not None:",
        "kernels/test_transform.py",
    ),
    CodeMutant(
        "the tail of a row is half as long",
        "tail = 1 << (channels - head - 1).bit_length() if channels > head else 0",
        "tail = 1 << (channels - head - 1).bit_length() - 1 if channels > head + 1 else 0",
        "kernels/test_quantization.py",
    ),
    CodeMutant(
        "a rotation that no kernel does is launched",
        "return channels <= LONGEST_ROW_IN_REGISTERS and group <= LARGEST_GROUP",
        "return group <= LARGEST_GROUP",
        "kernels/test_fused_ops.py::test_rows_longer_than_registers",
    ),
)

_FUSED_OPS = (
    CodeMutant(
        "a norm without its epsilon",
        "values = values * (values.square().mean(-1, keepdim=True) + norm.eps).rsqrt()",
        "values = values * values.square().mean(-1, keepdim=True).rsqrt()",
        "kernels/test_fused_ops.py::test_rounded_results",
    ),
    CodeMutant(
        "the mean of a LayerNorm is that of the row's head",
        "total += tl.sum(tail, axis=0)",
        "total += 0.0",
        "kernels/test_fused_ops.py::test_rounded_results",
    ),
    CodeMutant(
        "a modulation multiplies by 1 + scale, and not by scale",
        "values = tl.fma(values, _load_shared(scale_row, offsets, K), _load_shared(shift_row, offsets, K))",
        "values = tl.fma(values, 1.0 + _load_shared(scale_row, offsets, K), _load_shared(shift_row, offsets, K))",
        "kernels/test_fused_ops.py::test_rounded_results",
    ),
    CodeMutant(
        "strides of samples and tokens are swapped",
        "(row // T).to(tl.int64) * sample_stride + (row % T).to(tl.int64) * token_stride",
        "(row // T).to(tl.int64) * token_stride + (row % T).to(tl.int64) * sample_stride",
        "kernels/test_fused_ops.py::test_modulations_of_every_shape",
    ),
    CodeMutant(
        "gelu's tanh form is its sigmoid form",
        "x * tl.fma(x * x, 0.07135481627260025, 1.5957691216057308)",
        "x * tl.fma(x * x, 0.0, 1.702)",
        "kernels/test_fused_ops.py::test_rounded_results",
    ),
    CodeMutant(
        "what stands beside a gate comes behind it",
        "values = torch.cat([beside.float(), values], dim=-1)",
        "values = torch.cat([values, beside.float()], dim=-1)",
        "kernels/test_fused_ops.py::test_two_parts_side_by_side",
    ),
    CodeMutant(
        "rotary positions take another element of their matrix",
        "turned_second = tl.fma(first, f10, second * f11)",
        "turned_second = tl.fma(first, f01, second * f11)",
        "kernels/test_fused_ops.py::test_results_in_floats",
    ),
    CodeMutant(
        "the keys' norm has the queries' epsilon",
        "row % T, k_head, k_out_head, k_eps,",
        "row % T, k_head, k_out_head, q_eps,",
        "kernels/test_fused_ops.py::test_norm_rope_into_slices",
    ),
    CodeMutant(
        "a fused op takes the launch of other strides",
        "(tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())",
        "(tensor.shape, tensor.dtype, tensor.get_device())",
        "kernels/test_fused_ops.py::test_strided_tokens_of_a_norm",
    ),
    CodeMutant(
        "a fused op loses a gradient in silence",
        "return torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad",
        "return any(isinstance(value, torch.Tensor) and value.grad is not None",
        "kernels/test_fused_ops.py::test_a_gradient_passes_the_residual",
    ),
    CodeMutant(
        "operands on two devices are not refused",
        "if len(set(devices.values())) > 1:",
        "if len(set(devices.values())) > 2:",
        "kernels/test_int8_gemm.py::test_bad_arguments_are_named",
    ),
)

_CARDS = (
    CodeMutant(
        "the tuner takes the slowest",
        "config = min(survey, key=survey.__getitem__, default=None)",
        "config = max(survey, key=survey.__getitem__, default=None)",
        "kernels/test_tuning.py",
    ),
    CodeMutant(
        "the tuner looks closer at those far from the best",
        "if survey[config] <= reach",
        "if survey[config] >= reach",
        "kernels/test_tuning.py",
    ),
    CodeMutant(
        "a measurement with another Triton counts",
        '"triton": triton.__version__, "kernel_source"',
        '"triton": "", "kernel_source"',
        "kernels/test_tuning.py",
    ),
    CodeMutant(
        "a bucket holds one M too few",
        "power = max(16, 1 << (m - 1).bit_length())",
        "power = max(16, 1 << m.bit_length())",
        "kernels/test_tuning.py::test_m_buckets",
    ),
    CodeMutant(
        "parts of sums may be rounded on their way",
        "halves = torch.where(channel < _K // 2, signs, -signs)",
        "halves = torch.where(channel < _K // 2, 0 * signs, 0 * signs)",
        "kernels/test_exactness.py::test_a_wrong_kernel_is_seen",
    ),
    CodeMutant(
        "a kernel is asked for one launch only",
        "    for _ in range(2):\n        out = torch.full((_M, _N), 77",
        "    for _ in range(1):\n        out = torch.full((_M, _N), 77",
        "kernels/test_exactness.py::test_a_kernel_that_is_right_only_the_first_time_is_seen",
    ),
    CodeMutant(
        "a ring is taken unseen while a graph is captured",
        'if config.pipeline != "ring"), configs[0])',
        "if True), configs[0])",
        "kernels/test_tuning.py::test_while_a_graph_is_captured_no_ring_is_taken_unseen",
    ),
    CodeMutant(
        "keys keep what all have in common",
        "_rotated(keys - (keys.mean(2) if key_mean is None else key_mean.float()).unsqueeze(-2))",
        "_rotated(keys - (0 * keys.mean(2) if key_mean is None else key_mean.float()).unsqueeze(-2))",
        "kernels/test_int8_attention.py",
    ),
    CodeMutant(
        "INT8 attention forgets the last tile's edge",
        '        logits = tl.where(inside[None, :], logits, float("-inf"))\n    if MASK',
        "        logits = tl.where(inside[None, :], logits, 0.0)\n    if MASK",
        "kernels/test_int8_attention.py::test_attention",
    ),
    CodeMutant(
        "while a graph is captured nothing is known",
        "return self._known(key) or plain",
        "return plain",
        "kernels/test_tuning.py",
    ),
    CodeMutant(
        "a process overwrites what others measured",
        "self._replace(self._load() | self._measured)",
        "self._replace(self._measured)",
        "kernels/test_tuning.py",
    ),
    CodeMutant(
        "out of memory while tuning ends the sampling",
        "except torch.cuda.OutOfMemoryError:\n            logger.info",
        "except ZeroDivisionError:\n            logger.info",
        "kernels/test_tuning.py",
    ),
    CodeMutant(
        "an AMD card is said to run the kernel",
        'if device.type != "cuda" or torch.version.hip is not None:\n        return False',
        'if device.type != "cuda":\n        return False',
        "kernels/test_device.py",
    ),
    CodeMutant(
        "nothing is said of a Triton that another PyTorch is built for",
        "if wanted is None or installed == wanted or _is_ahead(wanted):",
        "if wanted is None or installed or _is_ahead(wanted):",
        "test_windows.py",
    ),
    CodeMutant(
        "the command for the portable build is one of its inner folder",
        "folder = python.parent.parent if portable else python.parent",
        "folder = python.parent",
        "test_windows.py",
    ),
    CodeMutant(
        "a missing Triton is a toast at load and another one in each run",
        "reason = known\n",
        "pass\n",
        "nodes/test_installed.py",
    ),
    CodeMutant(
        "the fallback to bf16 is no fallback: nobody is warned",
        "return ComputePath(BF16, reason, fallback=True, blocked=obstacle is not None)",
        "return ComputePath(BF16, reason, fallback=False, blocked=obstacle is not None)",
        "kernels/test_device.py",
    ),
    CodeMutant(
        "what is faster by noise takes the fused kernel's place",
        "times.get(FUSED, math.inf) <= (1 + _MARGIN) * times[best]",
        "times.get(FUSED, math.inf) <= (1 - _MARGIN) * times[best]",
        "kernels/test_device.py",
    ),
    CodeMutant(
        "what was measured on another machine decides",
        'return content if content.get("machine") == machine else {}',
        'return content if "machine" in content else {}',
        "kernels/test_device.py kernels/test_exact_attention.py",
    ),
    CodeMutant(
        "a way of exact attention that failed is tried again at each call",
        "        _plans[key] = plan\n",
        "",
        "kernels/test_exact_attention.py",
    ),
    CodeMutant(
        "a new measurement of attention counts only after a restart",
        "    finally:\n        _plans.clear()",
        "    finally:\n        pass",
        "kernels/test_exact_attention.py",
    ),
    CodeMutant(
        "the order of attention backends stays after the call",
        "        put(before)\n",
        "        put(get())\n",
        "kernels/test_exact_attention.py",
    ),
    CodeMutant(
        "a smoothed layer is given to ComfyUI's own INT8",
        "return smooth is None and activation_bits == 8",
        "return activation_bits == 8",
        "nodes/test_measured_paths.py kernels/test_device.py",
    ),
    CodeMutant(
        "the benchmark takes a throttled card for a healthy one",
        "if expected is not None and rate < _LEAST_SHARE * expected:",
        "if expected is not None and rate > expected:",
        "kernels/test_health.py",
    ),
    CodeMutant(
        "a faster linear makes the predicted image slower",
        "self.total * (1 - (before - after) / self.watched)",
        "self.total * (1 - (after - before) / self.watched)",
        "kernels/test_forward_split.py",
    ),
)

_NUMERICS = (
    CodeMutant(
        "alpha moves outliers the other way",
        "factors = activation.pow(alpha) / weight.pow(1.0 - alpha)",
        "factors = activation.pow(1.0 - alpha) / weight.pow(alpha)",
        "kernels/test_quantization.py::test_smoothing_factors_formula",
    ),
    CodeMutant(
        "weights may become -128",
        "q[rows] = steps.clamp(-127, 127).to(torch.int8)",
        "q[rows] = steps.clamp(-128, 127).to(torch.int8)",
        "kernels/test_groups.py::test_a_clipped_scale_is_the_best_of_its_grid",
    ),
    CodeMutant(
        "scales clip where that loses most",
        "best = torch.where(squares < least, candidate, best)",
        "best = torch.where(squares > least, candidate, best)",
        "kernels/test_groups.py",
    ),
    CodeMutant(
        "the worst of all transforms is taken",
        "return min(range(len(errors[0])), key=worst_ratio)",
        "return max(range(len(errors[0])), key=worst_ratio)",
        "kernels/test_groups.py",
    ),
    CodeMutant(
        "a calibration remembers the latest call's range",
        "absmax = magnitudes.amax(dim=0)",
        "absmax = magnitudes[-1]",
        "kernels/test_statistics.py",
    ),
    CodeMutant(
        "later calls take the place of earlier ones in a sample",
        "slot = self._random.randrange(self.calls)",
        "slot = self._random.randrange(SAMPLED_CALLS)",
        "kernels/test_statistics.py",
    ),
    CodeMutant(
        "the sturdiest layers are protected",
        "key=lambda name: (-fragility[name], name))",
        "key=lambda name: (fragility[name], name))",
        "kernels/test_groups.py::test_a_number_of_layers",
    ),
    CodeMutant(
        "calibrated rounding feeds the error back with the wrong sign",
        "error.addmm_((done[-1][0].float() * scale[:, None]).sub_(block), rows)",
        "error.addmm_((done[-1][0].float() * scale[:, None]).sub_(block), rows, alpha=-1)",
        "kernels/test_calibrated_rounding.py",
    ),
    CodeMutant(
        "calibrated rounding is kept where it loses",
        "if not calibrated < nearest:",
        "if calibrated < 0:",
        "kernels/test_calibrated_rounding.py",
    ),
    CodeMutant(
        "codes of 4 bits make no column's error good",
        "left[:, column:] -= (value - whole * divisor) * feedback[column, column:]",
        "left[:, column] -= value[:, 0] - whole[:, 0] * divisor[:, 0]",
        "kernels/test_coded_weights.py",
    ),
    CodeMutant(
        "a group of codes takes the scale of its largest value",
        "return scales.gather(1, _first_least(squares))[:, 0]",
        "return scales[:, 14]",
        "kernels/test_coded_weights.py",
    ),
    CodeMutant(
        "the kernel rounds scales below FP8's smallest normal number as normal ones",
        "tl.where(values < _SMALLEST_NORMAL, (values + _SUBNORMAL) - _SUBNORMAL, normal)",
        "normal",
        "kernels/test_coded_weights.py",
    ),
    CodeMutant(
        "layers with weights of 4 bits are protected by how fragile plain rounding finds them",
        "lost = {name: errors.get(name, 0.0) for name in coded}",
        "lost = {name: -errors.get(name, 0.0) for name in coded}",
        "nodes/test_four_bit_weights.py",
    ),
    CodeMutant(
        "all rows round by the same random numbers",
        "tl.rand(seed, first + offsets, n_rounds=_PHILOX_ROUNDS)",
        "tl.rand(seed, offsets, n_rounds=_PHILOX_ROUNDS)",
        "kernels/test_weight_conversion.py::test_rounding_differs_between_rows_and_columns",
    ),
    CodeMutant(
        "all rows of a weight take the first one's scale",
        "values *= tl.load(scale + row * stride_scale)",
        "values *= tl.load(scale)",
        "kernels/test_weight_conversion.py::test_to_int8_and_back",
    ),
    CodeMutant(
        "a LoRA is ignored where a weight becomes INT8",
        "values = values + low_rank.up[rows].float() @ low_rank.down.float()",
        "pass",
        "kernels/test_gguf_reading.py::test_a_low_rank_of_many_rows",
    ),
    CodeMutant(
        "the kernel subtracts a LoRA from half of the weights",
        "second += tl.reshape(added, (ROWS * BESIDE, RUNS, 16))",
        "second -= tl.reshape(added, (ROWS * BESIDE, RUNS, 16))",
        "kernels/test_gguf_reading.py::test_a_low_rank_is_added_before_rounding",
    ),
)

_STORED_WEIGHTS = (
    CodeMutant(
        "nibbles of GGUF are read the other way round",
        "shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)",
        "shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).flip(0)",
        "kernels/test_gguf_reading.py",
    ),
    CodeMutant(
        "the kernel takes a minimum of Q4_K out of the scales",
        "m = tl.where(sub < 4, middle & 63,",
        "m = tl.where(sub < 4, low & 63,",
        "kernels/test_gguf_reading.py",
    ),
    CodeMutant(
        "scales and minima of Q4_K are packed in each other's place",
        "for values in (sc, m))\n    return torch.cat([low, middle,",
        "for values in (m, sc))\n    return torch.cat([low, middle,",
        "kernels/test_gguf_quantizing.py",
    ),
    CodeMutant(
        "a row of GGUF's blocks with an Inf gets the scale Inf",
        'tl.store(scale + row, tl.where(bits >= INFINITY_BITS, float("nan"), row_scale))',
        "tl.store(scale + row, row_scale)",
        "kernels/test_gguf_reading.py::test_a_broken_scale_breaks_its_channel_and_no_other",
    ),
    CodeMutant(
        "codes of 6 bits take their upper bits of one column",
        "code |= (upper >> 2 * NUMBER & 3) << 4",
        "code |= (upper >> 2 & 3) << 4",
        "kernels/test_grouped_weights.py",
    ),
    CodeMutant(
        "columns of codes trade places in pairs",
        "codes = torch.stack([low & 15, low >> 4], dim=2).flatten(1)",
        "codes = torch.stack([low >> 4, low & 15], dim=2).flatten(1)",
        "kernels/test_grouped_weights.py",
    ),
    CodeMutant(
        "a LoRA on codes is rounded by the scale that the weight had alone",
        "whole = rounded_rows(whole * addition.scale[some], addition.larger, addition.low_rank, some)",
        "whole = rounded_rows(whole * addition.scale[some], addition.scale, addition.low_rank, some)",
        "kernels/test_grouped_weights.py::test_a_low_rank_is_added_before_rounding",
    ),
    CodeMutant(
        "a LoRA on a stored weight is not rotated as that is",
        "rotation.to_weight(down).to(dtype)",
        "down",
        "nodes/test_grouped_weights.py::test_a_lora_acts_beside_stored_weights",
    ),
    CodeMutant(
        "LoRAs on a stored weight lose their strength",
        "torch.cat([lora.factor * moved(",
        "torch.cat([moved(",
        "nodes/test_gguf_loading.py::test_loras_are_rounded_with_a_stored_weight_once",
    ),
    CodeMutant(
        "a LoRA that ComfyUI attached twice acts twice",
        "if key is None or key not in keys:",
        "if key is None or key is not None:",
        "nodes/test_gguf_loading.py::test_unloaded_in_part_a_lora_acts_once nodes/test_lora.py",
    ),
    CodeMutant(
        "a GGUF file's dimensions are written in the model's order",
        'struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))',
        'struct.pack(f"<I{len(shape)}Q", len(shape), *shape)',
        "nodes/test_gguf_writer.py",
    ),
    CodeMutant(
        "tensors of a GGUF file follow each other without padding",
        "    return -size % 32\n",
        "    return 0\n",
        "nodes/test_gguf_writer.py",
    ),
    CodeMutant(
        "bytes behind a GGUF file's last tensor are not noticed",
        "    if size > place:\n",
        "    if size > 2 * place:\n",
        "nodes/test_gguf_mutants.py::test_bytes_behind_the_last_tensor",
    ),
)

_FILES = (
    CodeMutant(
        "the names of a whole checkpoint keep their prefix",
        '{prefix: ""}, filter_keys=only)',
        "{prefix: prefix}, filter_keys=only)",
        "nodes/test_loading.py",
    ),
    CodeMutant(
        "a smoothed layer is marked as a native one",
        "return NATIVE_FORMAT if transform.smooth is None else SMOOTHED_FORMAT",
        "return NATIVE_FORMAT",
        "nodes/test_saving.py::test_a_smoothed_file_is_refused_by_stock_comfyui",
    ),
    CodeMutant(
        "all rotations are said to be of 256 channels",
        "convrot_groupsize=transform.rotation_group)",
        "convrot_groupsize=256)",
        "nodes/test_folding.py::test_rotated_layers_stay_rotated",
    ),
    CodeMutant(
        "a layer with 16-bit activations is not marked",
        "if activation_bits == 16 and not (",
        "if activation_bits == 17 and not (",
        "nodes/test_16_bit_activations.py::test_a_file_comes_back_bit_equal",
    ),
    CodeMutant(
        "rotation options under params are not checked",
        "return {**(nested if isinstance(nested, dict) else {}), **",
        "return {**({} if isinstance(nested, dict) else {}), **",
        "nodes/test_bad_files.py::test_a_rotation_group_that_does_not_fit",
    ),
    CodeMutant(
        "what a file said of its layers when it was saved is not compared",
        "_as_written(checkpoint.tensors, checkpoint.metadata)",
        "_as_written(checkpoint.tensors, {})",
        "nodes/test_damaged_layers.py::test_a_rotation_lost_from_a_file_of_this_pack",
    ),
    CodeMutant(
        "the scale of an INT8 layer is not looked at",
        "check_scale(key, scale, layer.weight, LARGEST / 127)",
        "pass",
        "nodes/test_damaged_layers.py::test_scales_that_no_quantizer_writes",
    ),
    CodeMutant(
        "a negative scale passes",
        "    if bool((values < 0).any()):",
        "    if bool((values < -1e30).any()):",
        "nodes/test_damaged_layers.py::test_scales_that_no_quantizer_writes",
    ),
    CodeMutant(
        "a NaN passes for a weight",
        "if not largest <= LARGEST:",
        "if largest > LARGEST:",
        "nodes/test_damaged_layers.py::test_codes_that_are_not_well_formed",
    ),
    CodeMutant(
        "a layer of another size is loaded",
        "if needed is not None and weight.shape != needed:",
        "if needed is None:",
        "nodes/test_bad_files.py::test_a_layer_of_another_size",
    ),
    CodeMutant(
        "what an INT8 file holds in floats becomes INT8",
        "int8 = linear and not self._whole and not",
        "int8 = linear and not",
        "nodes/test_summary.py::test_layers_that_an_int8_file_has_in_floats_are_protected",
    ),
    CodeMutant(
        "weights stay as stored that ComfyUI patches where they are",
        "and weight.nbytes >= SMALLEST_STORED",
        "and weight.nbytes > 0",
        "nodes/test_grouped_weights.py::test_small_weights_become_int8_all_the_same",
    ),
    CodeMutant(
        "a large weight with values that no weight has becomes INT8",
        'check_finite(f"{name}.weight", 127 * scale)',
        "pass",
        "nodes/test_damaged_models.py::test_a_large_weight_that_becomes_int8",
    ),
    CodeMutant(
        "a tensor that the file lacks is not missed",
        "    if lacking:\n        others",
        "    if len(lacking) > 1:\n        others",
        "nodes/test_damaged_layers.py::test_a_missing_tensor",
    ),
    CodeMutant(
        "the other branch's base checkpoint is taken",
        "if distance[nearest] < distance[checkpoint.branch]:",
        "if distance[nearest] > distance[checkpoint.branch]:",
        "nodes/test_transformer_lab.py",
    ),
    CodeMutant(
        "a model is loaded in bf16 though it leaves no room for inference",
        "dtype.itemsize + reserved_for_inference() <= total_memory(device)",
        "dtype.itemsize <= total_memory(device)",
        "nodes/test_loading.py::test_auto_without_gpu_computes_with_dequantized_weights",
    ),
    CodeMutant(
        "a save overwrites a file of the same name",
        "        if not _is_free(path):\n",
        "        if not path:\n",
        "nodes/test_concurrent_saving.py",
    ),
    CodeMutant(
        "saved files lose bits of float32",
        "return narrow if torch.equal(narrow.float(), tensor) else tensor",
        "return narrow",
        "nodes/test_saving.py::test_a_saved_model_comes_back_bit_equal",
    ),
    CodeMutant(
        "a LoRA is not saved",
        "return with_patches(model, key, weight.float()) if is_patched(model, key) else weight",
        "return weight",
        "nodes/test_saving.py::test_a_lora_is_baked_in nodes/test_saving_gguf.py::test_a_lora_is_baked_in",
    ),
    CodeMutant(
        "folded factors lose what they have in common",
        "common = float(smooth[0] / divisor[0])",
        "common = 1.0",
        "nodes/test_folding.py::test_a_folded_block_computes_the_same_in_stock_layers",
    ),
    CodeMutant(
        "a folded file that others refuse is not warned of",
        "if fold_factors and of_16_bits:",
        "if not fold_factors and of_16_bits:",
        "nodes/test_folding.py::test_layers_with_16_bit_activations_keep_them",
    ),
)

_MODELS = (
    CodeMutant(
        "projections outside of blocks are quantized, or nothing in blocks is",
        "return in_a_block or shape[0] * shape[1] >= _LARGE_PROJECTION",
        "return in_a_block and shape[0] * shape[1] >= _LARGE_PROJECTION",
        "nodes/test_layer_selection.py",
    ),
    CodeMutant(
        "a budget of error is not held for protected layers",
        "if settings.protection.accepts(result.error)}",
        "if result is not None}",
        "nodes/test_16_bit_activations.py::test_a_budget_that_no_layer_meets_with_8_bits "
        "nodes/test_16_bit_activations.py",
    ),
    CodeMutant(
        "layers are smoothed whose factors cannot be folded",
        "foldable = foldable_groups(model, targets) if only_foldable else None",
        "foldable = None",
        "nodes/test_folding.py::test_the_glyph_model_folds_where_its_modulation_feeds_one_layer",
    ),
    CodeMutant(
        "layers of two inputs share their factors",
        "lambda a, b: statistics[a].same_range_as(statistics[b]),",
        "lambda a, b: True,",
        "nodes/test_input_groups.py::test_only_linears_of_the_same_tensor_are_smoothed_alike",
    ),
    CodeMutant(
        "a calibration's observers stay in the model",
        "    for handle in handles:\n        handle.remove()",
        "    for handle in handles:\n        handle",
        "nodes/test_calibration.py",
    ),
    CodeMutant(
        "a NaN in a calibration is not seen",
        "if self.statistics[name].finite_calls < self.statistics[name].calls]",
        "if self.statistics[name].finite_calls > self.statistics[name].calls]",
        "nodes/test_calibration.py::test_a_nan_in_a_recording_names_the_first_layer_that_gets_it",
    ),
    CodeMutant(
        "a calibration's statistics of a layer that was never called are passed by",
        "if has_tensors != (calls > 0):",
        "if calls > 0 and not has_tensors:",
        "nodes/test_calibration.py::test_a_damaged_calibration_names_file_and_layer",
    ),
    CodeMutant(
        "linears with different factors share a quantized input",
        "None if transform.smooth is None else layer.input_group or layer",
        "None",
        "nodes/test_input_groups.py::test_readers_with_factors_of_their_own_get_inputs_of_their_own",
    ),
    CodeMutant(
        "a streamed weight is not given back",
        "        give_back(layer, cast)",
        "        pass",
        "nodes/test_given_back.py",
    ),
    CodeMutant(
        "a deferred call that computes something else is trusted",
        "told.max().item() <= _MOST_APART",
        "told.max().item() <= 1e9",
        "nodes/test_deferred.py::test_checking_finds_a_defect",
    ),
    CodeMutant(
        "a write into what a deferred operand reads is not seen",
        "if note is not None and note.is_in(storages):",
        "if note is not None and note.is_in(set()):",
        "nodes/test_deferred.py::test_a_write_into_what_waits_reads",
    ),
    CodeMutant(
        "a shift is added to the tokens of other frames",
        "(operand.scale is None or operand.rows is rows)",
        "True",
        "nodes/test_deferred.py::test_modulations",
    ),
    CodeMutant(
        "the kernel is applied to the MODEL itself, and not to a clone",
        "    patched = model.clone()\n",
        "    patched = model\n",
        "nodes/test_apply_kernel.py",
    ),
    CodeMutant(
        "that the kernel is not applied is not said",
        "if compute.fallback:\n        notices.warn(\n",
        "if not compute.fallback:\n        notices.warn(\n",
        "nodes/test_apply_kernel.py",
    ),
    CodeMutant(
        "a LoRA beside a product has the strength 1",
        "addmm_(rows, up.t(), alpha=lora.factor)",
        "addmm_(rows, up.t())",
        "nodes/test_lora.py::test_partially_loaded_a_lora_costs_no_second_rounding",
    ),
    CodeMutant(
        "what a linear's weight was is taken for what it is",
        "return self._numbers() is stored(weight) and self._settings() is params(weight)",
        "return self._numbers() is not None",
        "nodes/test_known_weights.py",
    ),
    CodeMutant(
        "a masked call gets attention without its mask",
        '({} if call.mask is None else {"attn_mask": call.mask})',
        "{}",
        "nodes/test_int8_attention.py",
    ),
    CodeMutant(
        "attention that asks for float32 gets INT8",
        "asks_for_more = call.attn_precision == torch.float32 != call.q.dtype",
        "asks_for_more = False",
        "nodes/test_int8_attention.py",
    ),
    CodeMutant(
        "the fastest exact attention replaces one that was chosen",
        "if not is_pytorchs(call.otherwise, call.mask, known):",
        "if not known:",
        "nodes/test_attention_kinds.py",
    ),
    CodeMutant(
        "a block that a calibration keeps exact gets INT8 attention",
        "options.get(KEEPS_EXACT) is True:",
        "options.get(KEEPS_EXACT) is None:",
        "nodes/test_calibrated_attention.py",
    ),
    CodeMutant(
        "the file does not say which blocks keep exact attention",
        "for block in self.attention if block.exact]",
        "for block in self.attention if not block]",
        "nodes/test_calibrated_attention.py",
    ),
    CodeMutant(
        "the benchmark lets a card that is not healthy decide",
        "    if not health.healthy:\n",
        "    if health is None:\n",
        "nodes/test_kernel_benchmark.py",
    ),
    CodeMutant(
        "one reference is compared with the first image only",
        "references *= count if len(references) == 1 else 1",
        "references *= 1",
        "nodes/test_compare_images.py",
    ),
    CodeMutant(
        "layers that ComfyUI computes are counted as fused",
        "if rank == _FUSED_RANK)",
        "if rank <= _NATIVE_RANK)",
        "nodes/test_measured_paths.py::test_each_linear_runs_its_fastest_way",
    ),
    CodeMutant(
        "a warning is said for each model and step",
        "    if (summary, detail) in said:\n",
        "    if summary in said:\n",
        "nodes/test_loading.py::test_auto_without_gpu_warns_once_per_run",
    ),
    CodeMutant(
        "a new file gets the number of the last one",
        "first = 1 + max(",
        "first = max(",
        "nodes/test_saving.py::test_files_are_numbered nodes/test_concurrent_saving.py",
    ),
    CodeMutant(
        "a cancel is not heard while a node works",
        "memory.check_cancelled()\n        self._done += 1",
        "self._done += 1",
        "nodes/test_progress.py",
    ),
)

MUTANTS = (
    *_LINEAR,
    *_ACTIVATIONS,
    *_FUSED_OPS,
    *_CARDS,
    *_NUMERICS,
    *_STORED_WEIGHTS,
    *_FILES,
    *_MODELS,
)
"""All of them, by subject."""

"""Faults of a base in few bits under an adapter."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = [
    Fault(
        "one-kernel-for-all-that-is-compiled",
        "ingot/models/quantized.py",
        'why = "it gives other numbers"',
        "return compiled",
        "a compiled kernel that turns codes into other numbers is trained with",
        "tests/models/test_quantized.py",
    ),
    Fault(
        "scales-of-another-block",
        "ingot/models/quantized.py",
        "(values.view(-1, BLOCK) * scales[:, None]).to(dtype)",
        "(values.view(-1, BLOCK) * scales.roll(1)[:, None]).to(dtype)",
        "each block of four-bit weights is scaled as the one before it",
        by="tests/models/test_quantized.py",
    ),
    Fault(
        "mean-of-scales-forgotten",
        "ingot/models/quantized.py",
        'scales = scales.view(-1) * wide + held["mean"]',
        "scales = scales.view(-1) * wide",
        "double quantisation forgets the mean of the scales",
        by="tests/models/test_quantized.py",
    ),
    Fault(
        "numbers-kept-for-backward",
        "ingot/models/quantized.py",
        "        out: Tensor = _Product.apply(x, self.packed, bias, self)  # type: ignore[no-untyped-call]\n",
        "        out = functional.linear(x, self.unpacked(x.dtype), bias)\n",
        "a dequantised copy of each matrix is kept until backward, and nothing is saved",
        by="tests/models/test_quantized.py",
    ),
    Fault(
        "quantised-twice",
        "ingot/models/quantized.py",
        "data = self.quantization.pack(weight)",
        "data = self.quantization.pack(self.quantization.rounded(weight))",
        "weights are quantised, turned back and quantised once more as they are loaded",
        by="tests/models/adapters/test_quantized.py",
    ),
    Fault(
        "experts-of-their-neighbours",
        "ingot/models/quantized_experts.py",
        "place.copy_(part @ stack.unpacked(number, dtype, data).T)",
        "place.copy_(part @ stack.unpacked(0, dtype, data).T)",
        "every row of a mixture goes through the first expert in few bits",
        by="tests/models/adapters/test_quantized.py",
    ),
    Fault(
        "reference-of-the-whole-base",
        "ingot/train/reference.py",
        "return setup.recipe.model.quantize if model_spec is setup.model_spec else None",
        "return None",
        "a policy beside four bits is held against the base in full: its first margins are not 0",
        by="tests/objectives/test_quantized.py",
    ),
    Fault(
        "merged-into-another-base",
        "ingot/train/finish.py",
        "return model, base if into is None else rounded_tensors(model, base, into)",
        "return model, base",
        "an adapter trained beside four bits is merged into the weights as they were",
        by="tests/train/test_quantized.py",
    ),
    Fault(
        "scales-cast-with-the-weights",
        "ingot/parallel/masters.py",
        "if not is_dtensor(parameter) and parameter.is_floating_point():",
        "if not is_dtensor(parameter):",
        "bytes of quantised matrices are cast to bf16 with the other weights",
        by="tests/train/test_quantized.py",
    ),
    Fault(
        "compressed-lowest-number",
        "ingot/models/hf/compressed.py",
        ".clamp(-most, most - 1)",
        ".clamp(1 - most, most - 1)",
        "the lowest of the integers that compressed-tensors has is never written",
        by="tests/checkpoints/test_compressed.py",
    ),
    Fault(
        "compressed-parts-unchecked",
        "ingot/models/hf/content.py",
        "                    self.compare(its_file, part, there[:])",
        "                    pass",
        "scales of compressed-tensors that changed since the export are read without a word",
        by="tests/checkpoints/test_compressed.py",
    ),
    Fault(
        "compressed-not-read-back",
        "ingot/checkpoints/compressed.py",
        "if self._wanted.get(name) != found.get(name)",
        "if name not in found",
        "numbers written wrong as compressed-tensors take their name",
        by="tests/checkpoints/test_compressed.py",
    ),
]

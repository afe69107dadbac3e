"""Every numerical tolerance of the tests, in one place. They are never loosened to make a test pass."""

# Largest difference of logits between our decoder and transformers' on the same float32 weights.
LOGITS_FP32 = 1e-4
# Relative difference, in norm, of gradients between our decoder and transformers' in float32.
GRADIENTS_FP32 = 1e-5
# A document packed beside others gives the logits that it gives alone.
PACKED = 1e-5
# Relative difference, in norm, of updated weights between any two splits of the same global batch (float32, SGD).
SPLIT_WEIGHTS = 1e-6
# Difference of losses between any two splits of the same global batch (float32, AdamW).
SPLIT_LOSS = 1e-5
# Relative difference of a mean loss summed in another order, float32.
LOSS_FP32 = 1e-6
# Loss after a few steps, bf16 products against float32 ones.
BF16_LOSS = 0.05
# Relative difference of numbers that are the same formula in float64, summed in another order.
EXACT = 1e-9
# Sums of negative log-likelihood over a few dozen tokens, float32: difference to another implementation or batch shape, relative or in nats.
NLL_FP32 = 1e-5
# Difference of one log-probability computed in another order, float32.
LOGPROB = 1e-4
# Relative difference of the first training loss, float32, from the same tokens through transformers, summed in float64.
REAL_LOSS = 1e-5

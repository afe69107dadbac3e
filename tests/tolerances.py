"""Every numerical tolerance of the tests, in one place. They are never loosened to make a test
pass.
"""

# Largest difference of logits between our decoder and transformers' on the same float32 weights.
LOGITS_FP32 = 1e-4
# Relative difference, in norm, of gradients between our decoder and transformers' in float32.
GRADIENTS_FP32 = 1e-5
# A document packed beside others gives the logits that it gives alone.
PACKED = 1e-5
# Relative difference, in norm, of updated weights between any two splits of the same global batch
# (float32, SGD).
SPLIT_WEIGHTS = 1e-6
# Difference of losses between any two splits of the same global batch (float32, AdamW).
SPLIT_LOSS = 1e-5
# Relative difference of a mean loss summed in another order, float32.
LOSS_FP32 = 1e-6
# Loss after a few steps, bf16 products against float32 ones.
BF16_LOSS = 0.05
# Relative difference of numbers that are the same formula in float64, summed in another order.
EXACT = 1e-9
# Sums of negative log-likelihood over a few dozen tokens, float32: difference to another
# implementation or batch shape, relative or in nats.
NLL_FP32 = 1e-5
# Difference of one log-probability computed in another order, float32.
LOGPROB = 1e-4
# Relative difference of the first training loss, float32, from the same tokens through
# transformers, summed in float64.
REAL_LOSS = 1e-5
# Relative difference, in norm, of logits between an adapter folded into its weights and beside
# them, both float32.
MERGED_FP32 = 1e-5
# The same with W + BA rounded to bf16. A bf16 number has 8 significant bits, so each weight is off
# by 2^-8 at most and by 0.4 of that in the mean square; a product's output is off by as much, and
# the n products that a token passes add up as independent errors do: 0.4 * 2^-8 * sqrt(n), that is
# 0.006 for the n = 16 of the tests' two layers. Twice that, for what non-linear parts add. The
# weights of the base alone suffer the same when exported to bf16.
MERGED_BF16 = 0.0125
# The same where both compute in bf16 as well: besides the weights the inputs and outputs of each
# product are rounded, in both, so sqrt(6) times as much.
MERGED_COMPUTED_BF16 = 0.03
# DPO's loss, rewards and gradients (relative, in norm) against TRL's on the same ids, float32.
TRL = 1e-5
# Relative difference of rotary frequencies, float32: the same formula with its powers taken in
# another order.
FREQUENCIES = 1e-6
# Relative difference, in norm, of attention's output and gradients between rows that ranks share
# and whole ones, float32: the same sums of a few dozen terms, taken in another order.
SHARED_ROWS = 1e-6
# The same in bf16, against float32 on the same rounded inputs: what enters and leaves each product
# is off by at most 2^-8, and by less than half of that in the mean square; there are a few of them,
# one after the other.
SHARED_ROWS_BF16 = 2**-8
# Mean loss over an overfit of a batch, float8 products against float32 ones: a float8 number has 4
# significant bits, errors of products are independent of each other, and a layer's output is a sum
# of dozens of them.
FLOAT8_LOSS = 0.02
# Relative difference, in norm, of a gradient that ranks summed in bf16 from one summed in float32:
# each part and each sum is rounded to 8 significant bits.
REDUCED_BF16 = 2**-8
# Seconds by which a wall time put together from the monotonic clock and one read from the wall
# clock may differ on a busy machine.
WALL_S = 0.25
# The same where it begins with the making of a process: the kernel tells that by a start of the
# machine that is known to a second.
AGE_S = 1.25
# Relative difference of the memory of a step that is traced without contents to the allocator's.
TRACED_MEMORY = 1e-3
# The same where ranks share experts: the plan spreads rows evenly, routers nearly.
TRACED_MEMORY_OF_EXPERTS = 0.05
# Log-probabilities of llama.cpp and of ours, both float32 with the same weights: sums of another
# order, and its fast exponential and square root.
LLAMA_CPP = 1e-3
# |p / p when sampled - 1| before the first update on a policy's own answers, float32.
FIRST_RATIO = 1e-5
# The largest |p / p when sampled - 1| of a token, where vLLM sampled it in float32.
SERVER_RATIO = 1e-3
# Relative difference, in norm, of log-probabilities between products in bf16, sums and all else in
# float32, and float32: what enters and leaves each product is off by 0.4 * 2^-8 in the mean square,
# for the 16 products of the tests' two layers sqrt(2 * 16) times that.
COMPUTED_BF16 = 0.009

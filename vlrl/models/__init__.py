"""Models: loading and saving, families, processing, packing, attention, log-probabilities.

adapters/ (LoRA, 4 bits), sharding/ (FSDP2, ZeRO), attention_kernels, balance, media_forms, tool_prompts and
vision_cache are only imported where settings, model or rows need them.

Families and processing
- Differences between families are in families.py alone; an unknown type gets a Family derived from its config, with
  padded rows. Engine and trainer share a Prompt with its rotary positions, from the model's own rope index.
- Text after a video gets positions after the video's last frame, as these models were trained and as vLLM does it.
  transformers 5.19 differs, which families.py corrects.
- One processor call per sample; the processor reports the visual tokens of each media. A prompt that is too long is
  rejected with id and length, and counted. Vision-token ids get no probability, in the engine and in the trainer.

Weights and passes
- Trainable parameters are float32, as small updates vanish in bfloat16; `model.dtype` applies to autocast and to frozen
  weights.
- Under LoRA the reference is the model with its adapter disabled. At most one chunk of logits exists at a time.
- A tensor read from a file (loading.load_model, adapters.lora.add, store.checkpoint.load_state) is copied to memory
  that torch allocates (store.aligned_memory): matrix kernels of CPUs differ in the last bits by the alignment of
  operands.
- Vision features are computed and cached one image at a time: the same bits whatever the batch and the cache. A frozen
  vision tower builds no graph, also under gradient checkpointing.

Attention of the shared row [prompt | completion 1 | ... | completion G]
- Prompt, images and vision tower are computed once per group, forward and backward; a row may hold several groups.
  attention.attention is registered with transformers as `vlrl_prefix_shared`; the row's layout is a forward keyword,
  and the mask a 4-D tensor of one element, so that transformers builds none.
- After the prompt the row is a tree (prefix_tree.py): tokens that several completions start with, observations and
  images included, are in the row once; their log-probabilities are computed once and read once per completion.
- The gradient of softmax attention needs only the output and the log-sum-exp over all keys of a query, so the flash
  kernel's backward pass, given those of the merged result, is exact for each part.
- Anything without a layout (padded rows) or not causal (the vision tower) uses the stock implementation.
  Log-probabilities and gradients of shared and padded rows agree within 1e-5 of each tensor's maximum.
- A group that is too large is cut into pieces that repeat the prompt. Only the attention pads tokens side by side,
  where lengths differ by less than a quarter; `masked` has a mask [runs, 1, A, P + A] per such bucket.

Ranks
- An optimizer step holds the same groups whatever the number of ranks: slices of all groups sorted by id
  (cost.optimizer_steps). The rank that trains on a group stores it; after scoring, groups only move within their
  optimizer step.
- Under FSDP all ranks run the same number of micro-batches, each with media if any has: packing.with_idle fills gaps
  with a prompt without completions."""

"""Models: loading and saving, families, processing, packing, attention, log-probabilities.

adapters/ (LoRA, 4 bits), sharding/ (FSDP2, ZeRO), attention_kernels, balance, media_forms, tool_prompts and
vision_cache are imported where settings, model or rows ask for them.

Families and processing
- What differs between families is named in families.py alone; a type that no table names gets a Family read off its
  config, with padded rows. Engine and trainer share a Prompt with its rotary positions, from the model's own rope
  index.
- Text after a video begins behind its last moment, as these models were trained and as vLLM has it, which transformers
  5.19 does otherwise: families.py corrects it.
- One processor call per sample; it says itself how many visual tokens each media became. A prompt that is too long is
  rejected with id and length, and counted. Vision-token ids get no probability, in the engine and in the trainer.

Weights and passes
- Trained weights are float32, as small updates vanish in bfloat16; `model.dtype` holds for autocast and frozen
  weights.
- Under LoRA the reference is the disabled adapter. Never more than a chunk of logits exists at once.
- A tensor from a file (loading.load_model, adapters.lora.add, store.checkpoint.load_state) moves to memory of its own
  (store.aligned_memory.own): a CPU's matrix kernels differ in the last bits by where their operands start.
- Vision features are cached one picture at a time: the same bits whatever the batch and the cache. A frozen vision
  tower builds no graph, under gradient checkpointing neither.

Attention of the shared row [prompt | answer 1 | ... | answer G]
- Prompt, images and vision tower are computed once per group, forward and backward; several groups may follow one
  another in a row. attention.attention is registered with transformers as `vlrl_prefix_shared`; the row's layout is a
  forward keyword, and the mask a 4-D tensor of one element, so that transformers builds none.
- Below the prompt the row is a tree (prefix_tree.py): tokens that several answers begin with, their observations and
  images included, are there once; their log-probabilities are computed once and read once per answer.
- The gradient of softmax attention needs only the output and the log-sum-exp over all keys of a query, so the flash
  kernel's backward pass, given those of the merged whole, is exact for each part.
- What has no layout (padded rows) or is not causal (the vision tower) goes to the stock implementation.
  Log-probabilities and gradients of shared and padded rows agree within 1e-5 of each tensor's maximum.
- A group that is too large is cut into pieces that repeat the prompt. Tokens are padded side by side for the attention
  alone, where lengths differ by less than a quarter; `masked` has a mask [answers, 1, A, P + A] per such bucket.

Ranks
- An optimizer step holds the same groups whatever the number of ranks: runs of all groups by id
  (cost.optimizer_steps). Who trains on a group stores it; after scoring, groups move only within their optimizer step.
- Under FSDP all ranks run equally many micro-batches, each with media where any has: packing.with_idle fills gaps with
  a prompt without answers."""

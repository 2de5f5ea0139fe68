"""Room for how a slot is stored (bf16, int8, int4, ...): nothing is here yet, every slot is held in full precision."""

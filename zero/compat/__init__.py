"""Names and files of DeepSpeed and Megatron."""

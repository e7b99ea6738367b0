"""How buffers in GPU memory are reduced: direct, staged, over IPC, or by NCCL."""

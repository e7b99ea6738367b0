"""How buffers in GPU memory are reduced: by MPI, staged through the host, or by NCCL."""

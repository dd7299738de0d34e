"""The time loop: its kernels in C++, Triton and PyTorch, its gradient, and slabs on several processes."""

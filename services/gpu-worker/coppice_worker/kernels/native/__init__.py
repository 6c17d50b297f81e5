"""C++ kernels for CPUs, compiled on the machine that uses them; importing this package compiles nothing."""

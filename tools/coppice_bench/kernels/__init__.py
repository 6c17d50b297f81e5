"""`coppice bench kernels`: each kernel of the worker beside what memory or matrix units could do, and beside others."""

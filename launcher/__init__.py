"""Command line, planning and supervision: the only package that knows what a run consists of."""

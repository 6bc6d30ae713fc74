"""Sandbox for untrusted Python programs, with limits enforced by the kernel; `docs/security.md` has its guarantees."""

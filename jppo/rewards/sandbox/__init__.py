"""Runs untrusted Python programs under limits that the kernel enforces; `docs/security.md` says what that promises."""

"""Programs that a model wrote, confined by the kernel: graded answers, and the tool `python`.

`choice.py` picks the sandbox and describes it. `launcher.py` starts a program, in control groups, and waits for it;
`child.py` restricts the child process by namespaces, Landlock and seccomp (`confine.py`), then runs it. Imports nothing
of jppo but itself: its processes start often. `code.py` grades programs, in a worker. Read `launcher.py` first.
"""

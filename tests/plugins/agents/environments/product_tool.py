"""A tool server for `verifiers`, which runs it as a program."""

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """One tool."""

    @vf.tool
    async def multiply(self, a: int, b: int) -> str:
        """Multiplies two numbers."""
        return str(a * b)


if __name__ == "__main__":
    Calculator.run()

"""Environments written as the documentation of `verifiers` has them: one turn, a game of several turns, tools."""

import verifiers.v1 as vf
from product_tool import Calculator


class Data(vf.TaskData):
    """A row."""

    answer: str


class Config(vf.TasksetConfig):
    """Which rows."""

    tools: bool = False
    count: int = 3


class Product(vf.Task[Data, vf.State, vf.TaskConfig]):
    """The product of two numbers; a short reply is worth a bit more."""

    @vf.reward
    async def right(self, task: Data, trace: vf.Trace) -> float:
        return float(task.answer in (trace.last_reply or ""))

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") < 10)


class Products(vf.Taskset[Product, Config]):
    """12*34, 13*34, ..."""

    @classmethod
    def toolsets(cls, config: Config) -> list[vf.Toolset]:
        return [Calculator(vf.SharedToolsetConfig())] if config.tools else []

    def load(self):
        for i in range(self.config.count):
            row = Data(prompt=f"What is {12 + i}*34?", system_prompt="Be brief.", answer=str((12 + i) * 34))
            yield Product(row, self.config.task)


class GameConfig(vf.EnvConfig):
    """One seat."""

    player: vf.AgentConfig = vf.AgentConfig()


class Game(vf.Env[GameConfig]):
    """The player guesses until the answer is right, three times at most."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            said = await interaction.turn()
            for guess in range(1, 4):
                if said.terminated or task.data.answer in said.last_reply or guess == 3:
                    break
                said = await interaction.turn("Wrong. Guess again.")
        interaction.trace.record_reward("guesses", 1.0 / guess, 1.0)


__all__ = ["Products"]

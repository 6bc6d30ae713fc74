"""Parts of the runs of ../trained.py: an agent, an environment, a reward function.

Standard library only: workers import it.
"""

import json
import os
import urllib.request

TURNS = 4
EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": EXPRESSION}}


def multiply(task):
    """Runs an episode with a calculator; starts in milliseconds, so that weight updates meet requests in flight."""
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(2):
        message = ask("chat/completions", {"messages": messages, "tools": [TOOL]})["message"]
        messages.append(message)
        for call in message.get("tool_calls", []):
            a, _, b = json.loads(call["function"]["arguments"])["expression"].partition("*")
            result = str(int(a) * int(b)) if a.isdigit() and b.isdigit() else "error"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if messages[-1] is message:
            break
    return {"reward": float((message["content"] or "").strip() == task["ground_truth"])}


def ask(route, body):
    """Returns the policy's answer to a request."""
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    asked = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/{route}", json.dumps(body).encode(), key)
    return json.load(urllib.request.urlopen(asked))["choices"][0]


class Successors:
    """Names a digit each turn; a turn that says the next digit earns 1 / TURNS."""

    def reset(self, prompt):
        """Sets the row's digits; the prompt has the first."""
        self.digits, self.turn = prompt.ground_truth, 0
        return ""

    def step(self, text):
        """Rewards a turn and names the next digit."""
        right = text.strip() == str((int(self.digits[self.turn]) + 1) % 10)
        self.turn += 1
        over = self.turn == TURNS
        return "" if over else self.digits[self.turn], right / TURNS, over


def last_line(data_source, solution_str, ground_truth, extra_info=None):
    """1 if the last line of a conversation by chat template is the truth."""
    return float(solution_str.rpartition("\n")[2].strip() == ground_truth)

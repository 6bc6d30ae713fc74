"""The worker process of the check `parity`: transformers' log-probs of a few tokens.

    python -m jppo.preflight.parity_worker DIRECTORY ID ID ...

Prints {"logp": [...]} of each token after the first, in float32, or {"missing": package} if the interpreter has no
torch or transformers.
"""

import json
import sys


def main(directory: str, ids: list[int]) -> None:
    """Prints the log-prob of each token given the earlier ones."""
    try:
        import torch
        import transformers
    except ImportError as e:
        print(json.dumps({"missing": e.name}))
        return
    torch.set_num_threads(1)
    # eager: the only implementation with every family's soft caps
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    torch.nn.Module.to(model, torch.float32)  # MXFP4 is read as bfloat16
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        logp = torch.log_softmax(model.eval()(tokens).logits[0, :-1].float(), -1)
    print(json.dumps({"logp": logp.gather(1, tokens[0, 1:, None])[:, 0].tolist()}))


if __name__ == "__main__":
    main(sys.argv[1], [int(word) for word in sys.argv[2:]])

"""The tokenizer of a run, held against every model that reads its tokens."""

import math
from typing import Any

from jppo.data.tokenizer import load_tokenizer
from jppo.errors import UserError
from jppo.models.config import ModelConfig
from jppo.settings import Common


def read_tokenizer(c: Common, *models: ModelConfig) -> Any:
    """Reads the policy's tokenizer and checks it and the lengths against every model that reads its tokens."""
    tokenizer = load_tokenizer(c.model.path)
    longest = c.data.longest_row
    for model in models:
        if len(tokenizer) > model.vocab_size:
            raise UserError(
                f"{c.model.path}: the tokenizer has {len(tokenizer)} tokens, the embedding of a model that reads them"
                f" vocab_size={model.vocab_size}; use the tokenizer that the model was made with"
            )
        configured = c.model.max_position_embeddings
        rope_limit = min((kind.rotary.longest or math.inf for kind in model.kinds), default=math.inf)
        if configured > rope_limit:
            raise UserError(
                f"model.max_position_embeddings={configured} must be at most {rope_limit}, the context of the model's"
                " rope scaling; lower it"
            )
        context = configured if configured > 0 else model.max_position_embeddings
        if longest > context:
            raise UserError(
                f"data.max_prompt_length+data.max_response_length={longest} must be within the model's"
                f" max_position_embeddings={context}; lower one of them, or raise model.max_position_embeddings"
            )
    return tokenizer

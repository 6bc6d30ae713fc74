"""Models: a decoder for all families, its heads, the table of its parameters, and Hugging Face files.

Pure except for `hf.py`, `hf_write.py` and `tensorfile.py`: no settings, no state, arrays in and out. It may import only
`errors`, `types`, `tensorheader` and, for `UserError`, `settings`.
Read `decoder.py` first: tokens to hidden states, top to bottom. Then `heads.py` (log-probs, entropy, values),
`params.py` (every parameter's names, shape and axes), and `families.py` (a row each; `config_reader.py` and
`config_fields.py` read config.json by it).
"""

"""Creates a tiny language model with random weights as a GGUF file for llama.cpp.

Bytes are its tokens, and one token opens a tool call; that one is made likely, so that the grammar is ever entered.
"""

from pathlib import Path

WIDTH, LAYERS, CONTEXT = 64, 2, 4096
OPENER = "<tool_call>\n"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n"
    'Answer with <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>.'
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'tool' %}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(path: Path, open_calls: bool) -> None:
    """Writes the model."""
    import gguf
    import numpy as np

    tokens = ["<unk>", "<s>", "</s>", OPENER, "</tool_call>", "<|im_start|>", "<|im_end|>"]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.USER_DEFINED] * 4  # the grammar reads them, which it does not with control tokens
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds += [gguf.TokenType.BYTE] * 256
    tokens += [chr(code) for code in range(32, 127)]
    kinds += [gguf.TokenType.NORMAL] * 95
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // 4)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(7)

    def weights(*shape: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
        return (random.standard_normal(shape) * 0.05).astype(np.float32)

    embedding = weights(len(tokens), WIDTH)
    embedding[:, 0] = 1.0  # held constant, so that one row of the output is a bias
    output = weights(len(tokens), WIDTH)
    output[tokens.index(OPENER), 0] = 40.0 if open_calls else 0.0
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, dtype=np.float32))
    writer.add_tensor("output.weight", output)
    for layer in range(LAYERS):
        name = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{name}{norm}.weight", np.ones(WIDTH, dtype=np.float32))
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.add_tensor(f"{name}{part}.weight", weights(WIDTH, WIDTH) * 0.1)
        writer.add_tensor(f"{name}ffn_gate.weight", weights(2 * WIDTH, WIDTH) * 0.1)
        writer.add_tensor(f"{name}ffn_up.weight", weights(2 * WIDTH, WIDTH) * 0.1)
        writer.add_tensor(f"{name}ffn_down.weight", weights(WIDTH, 2 * WIDTH) * 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    import sys
    import time

    import xllamacpp

    servers = []
    for kind, port in zip(("text", "calls"), sys.argv[2:], strict=True):
        parameters = xllamacpp.CommonParams()
        parameters.model.path = f"{sys.argv[1]}/{kind}.gguf"
        write(Path(parameters.model.path), open_calls=kind == "calls")
        parameters.port = int(port)
        parameters.n_ctx = CONTEXT
        parameters.use_jinja = True
        parameters.cpuparams.n_threads = 1
        servers.append(xllamacpp.Server(parameters))
    print("ready", flush=True)
    while True:
        time.sleep(3600)

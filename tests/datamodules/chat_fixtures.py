"""A tokenizer small enough to predict by hand, and chat templates in the shapes that models use."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
)
MERGES = (
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
    ("Ġ", "hello"),
    ("Ċ", "Ċ"),
)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_WITHOUT_GENERATION_PROMPT = CHATML.split("{% if add_generation_prompt")[0]
CHATML_WITH_MARKERS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The markers leave the end-of-turn token out.
CHATML_WITH_SHORT_MARKERS = CHATML_WITH_MARKERS.replace(
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endgeneration %}",
    "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' + '\n' }}",
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# The system message goes into the last user message: history is rewritten as the conversation grows.
MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}"
    "{% for m in loop_messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' }}{% if loop.last and system is defined %}{{ system + '\n\n' }}{% endif %}{{ m['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = (
    "{% set ns = namespace(last_query=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['role'] != 'assistant' %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% else %}{% set think = '' %}{% set content = m['content'] %}"
    "{% if '</think>' in content %}"
    "{% set think = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last_query and (loop.last or think) %}"
    "{{ '<think>\n' + think + '\n</think>\n\n' }}{% endif %}"
    "{{ content + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Base-model style without any special token.
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def byte_level_tokenizer(
    template: str | None, *, bos: str = "<|im_start|>", eos: str = "<|im_end|>", pad: str | None = None
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over all bytes, the merges above (applied across words and lines) and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [left + right for left, right in MERGES]
    vocabulary = {token: i for i, token in enumerate(alphabet + merged)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # Offsets then leave out the leading space of a token, as in GPT-2 and Llama 3.
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad or eos,
        additional_special_tokens=list(SPECIAL),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def masked_runs(tokenizer: PreTrainedTokenizerFast, ids: list[int], mask: list[bool]) -> list[str]:
    """Decoded text of each unbroken run of masked tokens."""
    runs: list[list[int]] = []
    previous = False
    for token, chosen in zip(ids, mask, strict=True):
        if chosen and not previous:
            runs.append([])
        if chosen:
            runs[-1].append(token)
        previous = chosen
    return [str(tokenizer.decode(run)) for run in runs]

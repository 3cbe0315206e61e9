"""The demo model's tokenizer: one token per printable ASCII character, plus role tokens."""

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

PAD, UNK, BOS, END = "<pad>", "<unk>", "<bos>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, UNK, BOS, END, SYSTEM, USER, ASSISTANT)
CHARACTERS = "\t\n" + "".join(map(chr, range(32, 127)))

# END closes every message, so a finished answer and an answer in the history look the same. Tools
# are a line each, not JSON: a token a character, and 512 positions. What is not of tools stays as
# the weights were trained on it.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|>Tools:' }}"
    "{% for tool in tools %}"
    "{% set parameters = tool['function']['parameters'] or {} %}"
    "{{ '\n' + tool['function']['name'] }}"
    "{{ '(' + (parameters['properties'] or {}) | join(', ') + ')' }}"
    "{% if tool['function']['description'] %}{{ ' ' + tool['function']['description'] }}{% endif %}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('Unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{% if message['content'] is string %}{% set text = message['content'] %}"
    "{% else %}{% set text = message['content'] | map(attribute='text') | join('') %}{% endif %}"
    "{% set role = 'system' if message['role'] == 'tool' else message['role'] %}"
    "{{ '<|' + role + '|>' + text }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% set function = call['function'] %}"
    "{{ '<tool_call>\n{\"name\": ' + function['name'] | tojson }}"
    "{{ ', \"arguments\": ' + function['arguments'] | tojson + '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose decode restores every printable ASCII text exactly.

    Byte-pair encoding without merges splits text into characters; no pre-tokenizer and a fusing
    decoder leave spaces as they are. A character outside the vocabulary becomes ``<unk>``.
    """
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNK,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        padding_side="left",
    )

"""Chat templates that behave as those which families publish: turns, control tokens, and which form of a content each
role is read in. Written for these tests; only the control tokens are the families' own."""

_OPEN = "{% for message in messages %}"
_CLOSE = "{% endfor %}"
_RAISE_UNLESS_ALTERNATE = ("{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
                           "{{ raise_exception('roles must alternate') }}{% endif %}")


def _content(image: str, video: str = "", of: str = "message.content", trim: str = "") -> str:
    """A content of either form: texts as they are, marks of media in their places."""
    clip = "{% elif part.type == 'video' %}" + video if video else ""
    return ("{% if " + of + " is string %}{{ " + of + trim + " }}{% else %}{% for part in " + of + " %}"
            "{% if part.type == 'image' %}" + image + clip + "{% elif part.type == 'text' %}{{ part.text" + trim +
            " }}{% endif %}{% endfor %}{% endif %}")


_GLM_IMAGE, _GLM_VIDEO = (f"<|begin_of_{kind}|><|{kind}|><|end_of_{kind}|>" for kind in ("image", "video"))
GLM_4V = ("[gMASK]<sop>\n" + _OPEN + "{% if message.role == 'user' %}<|user|>\n{{ '' }}" +
          _content(_GLM_IMAGE, _GLM_VIDEO) + "{% else %}<|{{ message.role }}|>\n{{ message.content }}{% endif %}" +
          _CLOSE + "{% if add_generation_prompt %}<|assistant|>\n{{ '' }}{% endif %}")
"""GLM-4.1V: what a system or the model said is printed as it stands, and nothing ends a turn but the next one."""

GEMMA_3 = ("{{ bos_token }}{% set told = '' %}{% set turns = messages %}{% if messages[0].role == 'system' %}"
           "{% set turns = messages[1:] %}{% set told = messages[0].content if messages[0].content is string "
           "else messages[0].content[0].text %}{% endif %}{% for message in turns %}" + _RAISE_UNLESS_ALTERNATE +
           "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
           "{{ told + '\n\n' if loop.first and told else '' }}" + _content("<start_of_image>", trim=" | trim") +
           "<end_of_turn>\n{{ '' }}" + _CLOSE +
           "{% if add_generation_prompt %}<start_of_turn>model\n{{ '' }}{% endif %}")
"""Gemma 3: a system's first text stands before the first question; the turns of the two must alternate."""

GEMMA_4 = ("{{ bos_token }}" + _OPEN + "<|turn>{{ 'model' if message.role == 'assistant' else message.role }}\n" +
           _content("<|image|>", "<|video|>", trim=" | trim") + "<turn|>\n{{ '' }}" + _CLOSE +
           "{% if add_generation_prompt %}<|turn>model\n{{ '' }}{% endif %}")
"""Gemma 4."""

LLAVA_1_5 = (_OPEN + "{% if message.role != 'system' %}{{ message.role | upper }}: {% endif %}"
             "{% for part in message.content if part.type == 'image' %}<image>\n{% endfor %}"
             "{% for part in message.content if part.type == 'text' %}"
             "{% if message.role == 'assistant' %}{% generation %}{{ part.text + ' ' }}{% endgeneration %}"
             "{% else %}{{ part.text + ' ' }}{% endif %}{% endfor %}" + _CLOSE +
             "{% if add_generation_prompt %}ASSISTANT:{% endif %}")
"""LLaVA 1.5: parts alone, pictures before the texts, and no token that ends a turn."""

MISTRAL_3 = ("{{ bos_token }}{% set turns = messages %}{% if messages[0].role == 'system' %}"
             "{% set turns = messages[1:] %}[SYSTEM_PROMPT]"
             "{{ messages[0].content if messages[0].content is string else messages[0].content[0].text }}"
             "[/SYSTEM_PROMPT]{% endif %}{% for message in turns %}" + _RAISE_UNLESS_ALTERNATE +
             "{% if message.role == 'user' %}[INST]" + _content("[IMG]") + "[/INST]"
             "{% else %}{{ message.content if message.content is string else message.content[0].text }}{{ eos_token }}"
             "{% endif %}" + _CLOSE)
"""Mistral Small 3.1: of what a system or the model said the first part alone; nothing opens the answer."""

_QWEN_MARKS = ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")
_QWEN_TURN = ("{% if message.role == 'system' and not loop.first %}{{ raise_exception('a system comes first') }}"
              "{% endif %}<|im_start|>{{ message.role }}\n{{ '' }}")
_ASKED = ("{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('nobody asks') }}"
          "{% endif %}")
_ANSWER = ("{% if message.role == 'assistant' %}{% set said = message.content if message.content is string else "
           "message.content | map(attribute='text') | join %}{{ said.split('</think>')[-1].lstrip('\n') }}{% else %}")
QWEN_3_THINKING = (_ASKED + _OPEN + _QWEN_TURN + _ANSWER + _content(*_QWEN_MARKS) + "{% endif %}<|im_end|>\n{{ '' }}" +
                   _CLOSE + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{{ '' }}{% endif %}")
"""Qwen3-VL-Thinking: earlier thinking is left out, and the next is opened."""

QWEN_3_5 = QWEN_3_THINKING.replace("<think>\n{{ '' }}", "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined "
                                   "and not enable_thinking else '<think>\n' }}")
"""Qwen3.5: as before, and thinking can be switched off."""

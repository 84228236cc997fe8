"""What chat templates begin an answer with, learned from their own renderings; templates are written in the manner of
public ones."""

from functools import partial

from jinja2 import Environment

from vlrl.models.chat_template import opening_text, turn_beginning

THINK = "<think>\n"
EMPTY = "<think>\n\n</think>\n\n"
QWEN = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n@{% endif %}")
LAST_WITH_BLOCK = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
                   "<think>\n\n</think>\n\n{% endif %}{{ m.content[0].text }}<|im_end|>\n{% endfor %}"
                   "{% if add_generation_prompt %}<|im_start|>assistant\n@{% endif %}")
BLOCK_IN_HISTORY = ("[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}"
                    "<think></think>\n{{ m.content }}{% else %}{% for c in m.content %}{{ c.text }}{% endfor %}"
                    "{% endif %}{% endfor %}"
                    "{% if add_generation_prompt %}<|assistant|>\n@{% endif %}")
STRINGS_ALONE = ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|>@{% endif %}")
WORDS = ("{% for m in messages %}{{ {'user': 'User', 'assistant': 'Assistant', 'system': 'System'}[m.role] }}: "
         "{{ m.content[0].text }}</s>\n{% endfor %}{% if add_generation_prompt %}Assistant:@{% endif %}")
NO_HEADER = ("{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content[0].text }}[/INST]{% else %}"
             "{{ m.content[0].text }}</s>{% endif %}{% endfor %}{% if messages[-1].role == 'user' %}@{% endif %}")
CHANNELS = ("{% for m in messages %}<|turn>{{ {'assistant': 'model'}.get(m.role, m.role) }}\n{{ m.content[0].text }}"
            "<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n@{% endif %}")
ALWAYS = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[0].text }}<|im_end|>\n{% endfor %}"
          "{% if messages[-1].role != 'assistant' %}<|im_start|>assistant\n@{% endif %}")
CONTROL = ("<|im_start|>", "<|im_end|>", "<|assistant|>", "<|user|>", "</s>", "[INST]", "[/INST]", "<|turn>", "<turn|>",
           "<|channel>", "<channel|>")


def render(template, messages, **options):
    return Environment().from_string(template).render(messages=messages, add_generation_prompt=True, **options)


def opened(template, *texts, system=""):
    """What a prompt of the template opens behind some turns."""
    made = partial(render, template)
    messages = [{"role": "system", "content": [{"type": "text", "text": system}]}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": [{"type": "text", "text": text}]}
                 for i, text in enumerate(texts)]
    return opening_text(made(messages), turn_beginning(made), CONTROL)


def test_the_end_of_a_generation_prompt():
    for begun in ("", THINK, "<think>", EMPTY, "<think></think>\n", "<seed:think>", "Answer: ", "{"):
        for template in (QWEN, LAST_WITH_BLOCK, BLOCK_IN_HISTORY, STRINGS_ALONE, WORDS, NO_HEADER, ALWAYS):
            filled = template.replace("@", "{{ '" + begun.replace("\n", "\\n") + "' }}")
            for texts in (("What is it?",), ("What?", "A cat.", "<think> Assistant: and now?")):
                assert opened(filled, *texts) == begun, filled


def test_it_may_differ_from_prompt_to_prompt_and_marks_of_the_template_are_no_text():
    template = QWEN.replace("@", "{% if '/no_think' in messages[-1].content[0].text %}<think>\n\n</think>\n\n{% else %}"
                            "<think>\n{% endif %}")
    assert opened(template, "Why?") == THINK and opened(template, "Why? /no_think") == EMPTY
    template = CHANNELS.replace("@", "<|channel>thought\n<channel|>")
    assert opened(template, "Why?") == "" and opened(template.replace("<channel|>", ""), "Why?") == "thought\n"
    assert turn_beginning(partial(render, "{% for m in messages %}{{ m.role }}{% endfor %}<think>")) == ""
    assert turn_beginning(partial(render, "{{ raise_exception('no') }}")) == ""
    assert opening_text("Why?<think>", "", CONTROL) == ""

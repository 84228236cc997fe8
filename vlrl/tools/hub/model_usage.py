"""The section of a model card on how to load the model. `tests/tools/test_model_card.py` runs the code for transformers
and PEFT exactly as it is printed."""

from __future__ import annotations

from vlrl.tools.hub.export import ExportedModel

_WHOLE = """```python
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained("{repo}", dtype="auto")
processor = AutoProcessor.from_pretrained("{repo}")
{ask}
```"""
_ADAPTER = """```python
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

base = AutoModelForImageTextToText.from_pretrained("{base}", dtype="auto")
model = PeftModel.from_pretrained(base, "{repo}")
processor = AutoProcessor.from_pretrained("{repo}")
{ask}
```"""
_VLLM = """

With vLLM:

```python
from PIL import Image
from vllm import LLM, SamplingParams

model = LLM("{repo}")
content = [{{"type": "image_pil", "image_pil": Image.open("picture.png")}},
           {{"type": "text", "text": "What is in this picture?"}}]
answers = model.chat([{{"role": "user", "content": content}}], SamplingParams(max_tokens=64))
print(answers[0].outputs[0].text)
```"""
_ASK = """content = [{"type": "image"}, {"type": "text", "text": "What is in this picture?"}]
text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
inputs = processor(text=text, images=[Image.open("picture.png")], return_tensors="pt").to(model.device)
answer = model.generate(**inputs, max_new_tokens=64)[0, inputs["input_ids"].shape[1]:]
print(processor.decode(answer, skip_special_tokens=True))"""


def usage(repo: str, exported: ExportedModel, base: str | None, on_hub: bool) -> str:
    """The section of a model card on how to load the model, as Markdown; "" for an adapter whose base model is not
    known. `base` is the name of the base model, and `on_hub` says whether it is on the Hub."""
    if exported.adapter and base is None:
        return ""
    form = _ADAPTER if exported.adapter else _WHOLE
    note = "" if on_hub or not exported.adapter else f"\n\n`{base}` is not on the Hub: it must exist at that path."
    served = "" if exported.adapter else _VLLM.format(repo=repo)
    return "## Use\n\n" + form.format(repo=repo, base=base, ask=_ASK) + note + served

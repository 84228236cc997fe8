"""Reading back HTML that the inspector writes."""

import re
from dataclasses import dataclass, field
from html import unescape
from html.parser import HTMLParser


@dataclass
class Markup(HTMLParser):
    """Tags, attributes, text and comments of some HTML, and whether every element is closed where it should be."""

    html: str
    tags: list[str] = field(default_factory=list)
    attributes: list[dict[str, str | None]] = field(default_factory=list)
    text: str = ""
    odd: list[str] = field(default_factory=list)
    """Comments, declarations, instructions, and elements that are closed in the wrong place."""

    def __post_init__(self):
        super().__init__()
        self.open: list[str] = []
        self.feed(self.html)
        self.close()
        self.odd += self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.odd.append(f"</{tag}>")

    def handle_data(self, data):
        self.text += data

    def handle_comment(self, data):
        self.odd.append(data)

    handle_decl = handle_pi = unknown_decl = handle_comment

    def all(self, tag):
        return [a for t, a in zip(self.tags, self.attributes, strict=True) if t == tag]


def words(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())

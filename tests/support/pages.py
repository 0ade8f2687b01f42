"""Pages of HTML, read."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "img", "link", "br", "hr", "input"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; opened tags must be closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open, self.said = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.said.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.said))

"""The bibliography, ``references.bib``: one entry for every method, data set and statistic, as text and as BibTeX."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import NamedTuple

from fedstat.study.collect import about

_ENTRY = re.compile(r"^@(?P<kind>\w+)\{(?P<key>\w+),$(?P<fields>.*?)^\}$", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^  (\w+) = \{(.*)\},$", re.MULTILINE)
_ACRONYM = re.compile(r"\((?P<name>[^()]+)\)$")


class Reference(NamedTuple):
    """An entry of the bibliography.

    Attributes
    ----------
    kind : str
        Type of the BibTeX entry.
    fields : mapping from str to str
        BibTeX fields: ``author`` ("Family, Given and Family, Given"; a body in braces), ``title`` in braces, others.
    bibtex : str
        The entry for a ``.bib`` file.
    """

    kind: str
    fields: Mapping[str, str]
    bibtex: str

    @property
    def title(self) -> str:
        """Title without its braces."""
        return self.fields["title"].strip("{}")

    @property
    def families(self) -> list[str]:
        """Family names of the authors."""
        return [author.partition(",")[0].strip("{}") for author in self.fields["author"].split(" and ")]

    @property
    def authors(self) -> str:
        """Authors as in a sentence: two by name, more as "et al."."""
        names = self.families
        return " and ".join(names) if len(names) < 3 else f"{names[0]} et al."

    @property
    def cited(self) -> str:
        """Author and year, as in a sentence.

        Examples
        --------
        >>> REFERENCES["jeong2022"].cited, REFERENCES["li2020"].cited
        ('Jeong and Hwang (2022)', 'Li et al. (2020)')
        """
        year = self.fields.get("year")
        return f"{self.authors} ({year})" if year else self.authors

    @property
    def source(self) -> str:
        """Author, year and where to find it, as lists of methods show it.

        Examples
        --------
        >>> [REFERENCES[key].source for key in ("li2020", "wu2024")]
        ['Li et al. (2020), arXiv:1812.06127', 'Wu et al. (2024), ACM MM']
        """
        acronym = _ACRONYM.search(self.fields.get("booktitle", ""))
        place = f"arXiv:{self.fields['eprint']}" if "eprint" in self.fields else acronym["name"] if acronym else ""
        return ", ".join(filter(None, (self.cited, place or self.fields.get("journal"))))

    @property
    def text(self) -> str:
        """The entry in words, for a list of references."""
        author, fields = self.fields["author"], self.fields
        who = self.families[0] if author.startswith("{") else author.replace(" and ", "; ")
        when = f" ({fields['year']})" if "year" in fields else ""
        names = ("journal", "booktitle", "publisher", "howpublished", "institution", "volume")
        place = [fields[name] for name in names if name in fields]
        place += [fields["pages"].replace("--", "–")] if "pages" in fields else []
        place += [f"version {fields['version']}"] if "version" in fields else []
        place += [f"arXiv:{fields['eprint']}"] if "eprint" in fields else []
        return f"{who}{when}. {self.title}.{' ' if place else ''}{', '.join(place)}{'.' if place else ''}"


def _read() -> dict[str, Reference]:
    text = resources.files(__package__).joinpath("references.bib").read_text(encoding="utf-8")
    return {
        entry["key"]: Reference(entry["kind"], dict(_FIELD.findall(entry["fields"])), entry[0])
        for entry in _ENTRY.finditer(text)
    }


REFERENCES = _read()
"""All entries by their keys."""

_DATA: dict[str, tuple[str, ...]] = {
    "digits": ("pedregosa2011",),
    "mnist": ("lecun1998",),
    "fashion": ("xiao2017",),
    "emnist": ("cohen2017",),
    "cifar": ("krizhevsky2009",),
    "svhn": ("netzer2011",),
    "tiny-imagenet": ("le2015",),
    "femnist": ("caldas2018",),
    "shakespeare-leaf": ("caldas2018",),
    "shakespeare": ("caldas2018",),
    "ag-news": ("zhang2015",),
}


def of_method(name: str) -> tuple[str, ...]:
    """Keys of the entries for an algorithm, by its name in runs and grids; () for one that fedstat does not have.

    Examples
    --------
    >>> of_method("fedprox+"), of_method("fedavg-personal-head-shrunken"), of_method("mine")
    (('li2020', 'wang2019'), ('mcmahan2017', 'jeong2022', 'efron1973'), ())
    """
    return tuple(key for key in about(name).keys if key in REFERENCES)


def of_data(name: str) -> tuple[str, ...]:
    """Keys of the entries for a data set of ``fedstat.data.SOURCES``, () for others.

    Examples
    --------
    >>> of_data("cifar-100:test"), of_data("emnist-balanced"), of_data("my own")
    (('krizhevsky2009',), ('cohen2017',), ())
    """
    bases = [base for base in _DATA if name.partition(":")[0] == base or name.startswith(f"{base}-")]
    return _DATA[max(bases, key=len)] if bases else ()


def bibliography(keys: Iterable[str] | None = None) -> str:
    """BibTeX of some entries, each once, in the order of ``REFERENCES``; of all by default."""
    wanted = set(REFERENCES if keys is None else keys)
    return "\n\n".join(entry.bibtex for key, entry in REFERENCES.items() if key in wanted)

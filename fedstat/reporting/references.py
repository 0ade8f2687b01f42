"""The bibliography: one entry for every method, data set and statistic, as text and as BibTeX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import NamedTuple


class Reference(NamedTuple):
    """An entry of the bibliography.

    Attributes
    ----------
    kind : str
        Type of the BibTeX entry.
    author : str
        "Family, Given and Family, Given", as BibTeX has it; a body in braces.
    title : str
    year : int or None
    fields : mapping from str to str
        Further BibTeX fields, such as ``journal`` and ``pages``.
    """

    kind: str
    author: str
    title: str
    year: int | None
    fields: Mapping[str, str] = {}

    @property
    def families(self) -> list[str]:
        """Family names of the authors."""
        return [one.partition(",")[0].strip("{}") for one in self.author.split(" and ")]

    @property
    def cited(self) -> str:
        """Author and year, as in a sentence.

        Examples
        --------
        >>> REFERENCES["jeong2022"].cited, REFERENCES["li2020"].cited
        ('Jeong and Hwang (2022)', 'Li et al. (2020)')
        """
        names = self.families
        who = " and ".join(names) if len(names) < 3 else f"{names[0]} et al."
        return f"{who} ({self.year})" if self.year else who

    @property
    def text(self) -> str:
        """The entry in words, for a list of references."""
        body = self.author.startswith("{")
        who = self.families[0] if body else "; ".join(one.strip() for one in self.author.split(" and "))
        place = [self.fields[name] for name in ("journal", "booktitle", "publisher", "howpublished", "institution")
                 if name in self.fields]  # fmt: skip
        place += [self.fields["volume"]] if "volume" in self.fields else []
        place += [self.fields["pages"].replace("--", "–")] if "pages" in self.fields else []
        place += [f"version {self.fields['version']}"] if "version" in self.fields else []
        place += [f"arXiv:{self.fields['eprint']}"] if "eprint" in self.fields else []
        when = f" ({self.year})" if self.year else ""
        return f"{who}{when}. {self.title}.{' ' if place else ''}{', '.join(place)}{'.' if place else ''}"

    def bibtex(self, key: str) -> str:
        """The entry for a ``.bib`` file.

        Examples
        --------
        >>> print(REFERENCES["fisher1935"].bibtex("fisher1935"))
        @book{fisher1935,
          author = {Fisher, Ronald A.},
          title = {{The design of experiments}},
          year = {1935},
          publisher = {Oliver and Boyd},
        }
        """
        found = {"author": self.author, "title": f"{{{self.title}}}"} | ({"year": str(self.year)} if self.year else {})
        found |= dict(self.fields) | ({"archiveprefix": "arXiv"} if "eprint" in self.fields else {})
        lines = [f"  {name} = {{{value}}}," for name, value in found.items()]
        return "\n".join([f"@{self.kind}{{{key},", *lines, "}"])


def _in(booktitle: str, **fields: str) -> dict[str, str]:
    return {"booktitle": booktitle} | fields


def _of(journal: str, **fields: str) -> dict[str, str]:
    return {"journal": journal} | fields


_AISTATS = "International Conference on Artificial Intelligence and Statistics (AISTATS)"
_NEURIPS = "Advances in Neural Information Processing Systems (NeurIPS)"
_ICML = "International Conference on Machine Learning (ICML)"

REFERENCES: dict[str, Reference] = {
    "fedstat": Reference(
        "software", "{the fedstat developers}",
        "fedstat: statistics of personalised federated learning", None, {"version": metadata.version("fedstat")},
    ),
    # Methods of federated learning.
    "wang2023": Reference(
        "misc", "Wang, Feifei and Tang, Huiyun and Li, Yang",
        "Factor-assisted federated learning for personalized optimization with heterogeneous data", 2023,
        {"eprint": "2312.04281"},
    ),
    "mcmahan2017": Reference(
        "inproceedings",
        "McMahan, H. Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and Agüera y Arcas, Blaise",
        "Communication-efficient learning of deep networks from decentralized data", 2017,
        _in(_AISTATS, pages="1273--1282", eprint="1602.05629"),
    ),
    "li2020": Reference(
        "inproceedings",
        "Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar and Talwalkar, Ameet and Smith, Virginia",
        "Federated optimization in heterogeneous networks", 2020,
        _in("Conference on Machine Learning and Systems (MLSys)", eprint="1812.06127"),
    ),
    "fallah2020": Reference(
        "inproceedings", "Fallah, Alireza and Mokhtari, Aryan and Ozdaglar, Asuman",
        "Personalized federated learning with theoretical guarantees: A model-agnostic meta-learning approach", 2020,
        _in(_NEURIPS, volume="33", eprint="2002.07948"),
    ),
    "dinh2020": Reference(
        "inproceedings", "Dinh, Canh T. and Tran, Nguyen H. and Nguyen, Tuan Dung",
        "Personalized federated learning with Moreau envelopes", 2020,
        _in(_NEURIPS, volume="33", eprint="2006.08848"),
    ),
    "li2021": Reference(
        "inproceedings", "Li, Tian and Hu, Shengyuan and Beirami, Ahmad and Smith, Virginia",
        "Ditto: Fair and robust federated learning through personalization", 2021, _in(_ICML, eprint="2012.04221"),
    ),
    "arivazhagan2019": Reference(
        "misc",
        "Arivazhagan, Manoj Ghuhan and Aggarwal, Vinay and Singh, Aaditya Kumar and Choudhary, Sunav",
        "Federated learning with personalization layers", 2019, {"eprint": "1912.00818"},
    ),
    "liang2020": Reference(
        "misc",
        "Liang, Paul Pu and Liu, Terrance and Ziyin, Liu and Allen, Nicholas B. and Auerbach, Randy P. and "
        "Brent, David and Salakhutdinov, Ruslan and Morency, Louis-Philippe",
        "Think locally, act globally: Federated learning with local and global representations", 2020,
        {"eprint": "2001.01523"},
    ),
    "marfoq2021": Reference(
        "inproceedings",
        "Marfoq, Othmane and Neglia, Giovanni and Bellet, Aurélien and Kameni, Laetitia and Vidal, Richard",
        "Federated multi-task learning under a mixture of distributions", 2021,
        _in(_NEURIPS, volume="34", pages="15434--15447", eprint="2108.10252"),
    ),
    "collins2021": Reference(
        "inproceedings", "Collins, Liam and Hassani, Hamed and Mokhtari, Aryan and Shakkottai, Sanjay",
        "Exploiting shared representations for personalized federated learning", 2021,
        _in(_ICML, pages="2089--2099", eprint="2102.07078"),
    ),
    "sattler2019": Reference(
        "misc", "Sattler, Felix and Müller, Klaus-Robert and Samek, Wojciech",
        "Clustered federated learning: Model-agnostic distributed multi-task optimization under privacy constraints",
        2019, {"eprint": "1910.01991"},
    ),
    "huang2021": Reference(
        "inproceedings",
        "Huang, Yutao and Chu, Lingyang and Zhou, Zirui and Wang, Lanjun and Liu, Jiangchuan and Pei, Jian and "
        "Zhang, Yong",
        "Personalized cross-silo federated learning on non-IID data", 2021,
        _in("AAAI Conference on Artificial Intelligence", volume="35", pages="7865--7873", eprint="2007.03797"),
    ),
    "zhang2021": Reference(
        "inproceedings",
        "Zhang, Michael and Sapra, Karan and Fidler, Sanja and Yeung, Serena and Alvarez, Jose M.",
        "Personalized federated learning with first order model optimization", 2021,
        _in("International Conference on Learning Representations (ICLR)", eprint="2012.08565"),
    ),
    "li2021bn": Reference(
        "inproceedings", "Li, Xiaoxiao and Jiang, Meirui and Zhang, Xiaofei and Kamp, Michael and Dou, Qi",
        "FedBN: Federated learning on non-IID features via local batch normalization", 2021,
        _in("International Conference on Learning Representations (ICLR)", eprint="2102.07623"),
    ),
    "chen2022": Reference(
        "inproceedings", "Chen, Hong-You and Chao, Wei-Lun",
        "On bridging generic and personalized federated learning for image classification", 2022,
        _in("International Conference on Learning Representations (ICLR)", eprint="2107.00778"),
    ),
    "li2021php": Reference(
        "inproceedings", "Li, Xin-Chun and Zhan, De-Chuan and Shao, Yunfeng and Li, Bingshuai and Song, Shaoming",
        "FedPHP: Federated personalization with inherited private models", 2021,
        _in("European Conference on Machine Learning and Knowledge Discovery in Databases (ECML PKDD)",
            pages="587--602", doi="10.1007/978-3-030-86486-6_36"),
    ),
    "jin2022": Reference(
        "article",
        "Jin, Hai and Bai, Dongshan and Yao, Dezhong and Dai, Yutong and Gu, Lin and Yu, Chen and Sun, Lichao",
        "Personalized edge intelligence via federated self-knowledge distillation", 2022,
        _of("IEEE Transactions on Parallel and Distributed Systems", volume="34(2)", pages="567--580"),
    ),
    "jeong2022": Reference(
        "inproceedings", "Jeong, Wonyong and Hwang, Sung Ju",
        "Factorized-FL: Personalized federated learning with parameter factorization and similarity matching", 2022,
        _in(_NEURIPS, volume="35", pages="35684--35695", eprint="2202.00270"),
    ),
    "chen2023": Reference(
        "inproceedings", "Chen, Daoyuan and Yao, Liuyi and Gao, Dawei and Ding, Bolin and Li, Yaliang",
        "Efficient personalized federated learning via sparse model-adaptation", 2023,
        _in(_ICML, pages="5234--5256", eprint="2305.02776"),
    ),
    "wu2023": Reference(
        "inproceedings", "Wu, Xinghao and Liu, Xuefeng and Niu, Jianwei and Zhu, Guogang and Tang, Shaojie",
        "Bold but cautious: Unlocking the potential of personalized federated learning through cautiously aggressive "
        "collaboration", 2023, _in("International Conference on Computer Vision (ICCV)", eprint="2309.11103"),
    ),
    "hyeonwoo2022": Reference(
        "inproceedings", "Hyeon-Woo, Nam and Ye-Bin, Moon and Oh, Tae-Hyun",
        "FedPara: Low-rank Hadamard product for communication-efficient federated learning", 2022,
        _in("International Conference on Learning Representations (ICLR)", eprint="2108.06098"),
    ),
    "wu2024": Reference(
        "inproceedings",
        "Wu, Xinghao and Liu, Xuefeng and Niu, Jianwei and Wang, Haolin and Tang, Shaojie and Zhu, Guogang and Su, Hao",
        "Decoupling general and personalized knowledge in federated learning via additive and low-rank decomposition",
        2024, _in("ACM International Conference on Multimedia (ACM MM)"),
    ),
    "zhang2023": Reference(
        "inproceedings",
        "Zhang, Jianqing and Hua, Yang and Wang, Hao and Song, Tao and Xue, Zhengui and Ma, Ruhui and Guan, Haibing",
        "FedCP: Separating feature information for personalized federated learning via conditional policy", 2023,
        _in("ACM SIGKDD Conference on Knowledge Discovery and Data Mining (KDD)", eprint="2307.01217"),
    ),
    "wang2019": Reference(
        "misc",
        "Wang, Kangkang and Mathews, Rajiv and Kiddon, Chloé and Eichner, Hubert and Beaufays, Françoise and "
        "Ramage, Daniel",
        "Federated evaluation of on-device personalization", 2019, {"eprint": "1910.10252"},
    ),
    "efron1973": Reference(
        "article", "Efron, Bradley and Morris, Carl",
        "Stein's estimation rule and its competitors: an empirical Bayes approach", 1973,
        _of("Journal of the American Statistical Association", volume="68", pages="117--130"),
    ),
    "mcmahan2018": Reference(
        "inproceedings", "McMahan, H. Brendan and Ramage, Daniel and Talwar, Kunal and Zhang, Li",
        "Learning differentially private recurrent language models", 2018,
        _in("International Conference on Learning Representations (ICLR)", eprint="1710.06963"),
    ),
    "zhu2019": Reference(
        "inproceedings", "Zhu, Ligeng and Liu, Zhijian and Han, Song", "Deep leakage from gradients", 2019,
        _in(_NEURIPS, volume="32"),
    ),
    # Data sets, and how they are dealt to clients.
    "pedregosa2011": Reference(
        "article",
        "Pedregosa, Fabian and Varoquaux, Gaël and Gramfort, Alexandre and Michel, Vincent and Thirion, Bertrand and "
        "Grisel, Olivier and Blondel, Mathieu and Prettenhofer, Peter and Weiss, Ron and Dubourg, Vincent and "
        "Vanderplas, Jake and Passos, Alexandre and Cournapeau, David and Brucher, Matthieu and Perrot, Matthieu and "
        "Duchesnay, Édouard",
        "Scikit-learn: Machine learning in Python", 2011,
        _of("Journal of Machine Learning Research", volume="12", pages="2825--2830"),
    ),
    "lecun1998": Reference(
        "article", "LeCun, Yann and Bottou, Léon and Bengio, Yoshua and Haffner, Patrick",
        "Gradient-based learning applied to document recognition", 1998,
        _of("Proceedings of the IEEE", volume="86", pages="2278--2324"),
    ),
    "xiao2017": Reference(
        "misc", "Xiao, Han and Rasul, Kashif and Vollgraf, Roland",
        "Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms", 2017,
        {"eprint": "1708.07747"},
    ),
    "cohen2017": Reference(
        "misc", "Cohen, Gregory and Afshar, Saeed and Tapson, Jonathan and van Schaik, André",
        "EMNIST: an extension of MNIST to handwritten letters", 2017, {"eprint": "1702.05373"},
    ),
    "krizhevsky2009": Reference(
        "techreport", "Krizhevsky, Alex and Hinton, Geoffrey",
        "Learning multiple layers of features from tiny images", 2009, {"institution": "University of Toronto"},
    ),
    "netzer2011": Reference(
        "inproceedings",
        "Netzer, Yuval and Wang, Tao and Coates, Adam and Bissacco, Alessandro and Wu, Bo and Ng, Andrew Y.",
        "Reading digits in natural images with unsupervised feature learning", 2011,
        _in("NIPS Workshop on Deep Learning and Unsupervised Feature Learning"),
    ),
    "le2015": Reference(
        "misc", "Le, Ya and Yang, Xuan", "Tiny ImageNet visual recognition challenge", 2015,
        {"howpublished": "CS 231N, Stanford University"},
    ),
    "caldas2018": Reference(
        "misc",
        "Caldas, Sebastian and Duddu, Sai Meher Karthik and Wu, Peter and Li, Tian and Konečný, Jakub and "
        "McMahan, H. Brendan and Smith, Virginia and Talwalkar, Ameet",
        "LEAF: A benchmark for federated settings", 2018, {"eprint": "1812.01097"},
    ),
    "zhang2015": Reference(
        "inproceedings", "Zhang, Xiang and Zhao, Junbo and LeCun, Yann",
        "Character-level convolutional networks for text classification", 2015, _in(_NEURIPS),
    ),
    "hsu2019": Reference(
        "misc", "Hsu, Tzu-Ming Harry and Qi, Hang and Brown, Matthew",
        "Measuring the effects of non-identical data distribution for federated visual classification", 2019,
        {"eprint": "1909.06335"},
    ),
    # Statistics.
    "harman1976": Reference(
        "book", "Harman, Harry H.", "Modern factor analysis", 1976, {"publisher": "University of Chicago Press"}
    ),
    "shrout1979": Reference(
        "article", "Shrout, Patrick E. and Fleiss, Joseph L.",
        "Intraclass correlations: uses in assessing rater reliability", 1979,
        _of("Psychological Bulletin", volume="86", pages="420--428"),
    ),
    "hubert1985": Reference(
        "article", "Hubert, Lawrence and Arabie, Phipps", "Comparing partitions", 1985,
        _of("Journal of Classification", volume="2", pages="193--218"),
    ),
    "efron1979": Reference(
        "article", "Efron, Bradley", "Bootstrap methods: another look at the jackknife", 1979,
        _of("Annals of Statistics", volume="7", pages="1--26"),
    ),
    "wilson1927": Reference(
        "article", "Wilson, Edwin B.", "Probable inference, the law of succession, and statistical inference", 1927,
        _of("Journal of the American Statistical Association", volume="22", pages="209--212"),
    ),
    "holm1979": Reference(
        "article", "Holm, Sture", "A simple sequentially rejective multiple test procedure", 1979,
        _of("Scandinavian Journal of Statistics", volume="6", pages="65--70"),
    ),
    "fisher1935": Reference(
        "book", "Fisher, Ronald A.", "The design of experiments", 1935, {"publisher": "Oliver and Boyd"}
    ),
    "kozachenko1987": Reference(
        "article", "Kozachenko, Lyudmyla F. and Leonenko, Nikolai N.",
        "Sample estimate of the entropy of a random vector", 1987,
        _of("Problems of Information Transmission", volume="23", pages="95--101"),
    ),
    "silverman1981": Reference(
        "article", "Silverman, Bernard W.", "Using kernel density estimates to investigate multimodality", 1981,
        _of("Journal of the Royal Statistical Society B", volume="43", pages="97--99"),
    ),
}  # fmt: skip
"""All entries by their keys."""

_FEDFAC = ("wang2023",)
_METHODS: dict[str, tuple[str, ...]] = {
    "local": (),
    "fedavg": ("mcmahan2017",),
    "fedprox": ("li2020",),
    "per-fedavg": ("fallah2020",),
    "per-fedavg-hf": ("fallah2020",),
    "pfedme": ("dinh2020",),
    "ditto": ("li2021",),
    "fedper": ("arivazhagan2019",),
    "lg-fedavg": ("liang2020",),
    "fedbn": ("li2021bn",),
    "fedrep": ("collins2021",),
    "fedrod": ("chen2022",),
    "fedphp": ("li2021php",),
    "pfedsd": ("jin2022",),
    "fedem": ("marfoq2021",),
    "clustered-fl": ("sattler2019",),
    "fedamp": ("huang2021",),
    "fedfomo": ("zhang2021",),
    "fedcac": ("wu2023",),
    "pfedgate": ("chen2023",),
    "pfedpara": ("hyeonwoo2022",),
    "fedsplit": _FEDFAC,
    "random": _FEDFAC,
    "random-redrawn": _FEDFAC,
    "fedfac-static": _FEDFAC,
    "fedfac-dynamic": _FEDFAC,
    "factorized-fl-alpha": ("jeong2022",),
    "factorized-fl-beta": ("jeong2022",),
    "feddecomp": ("wu2024",),
    "fedcp": ("zhang2023",),
}
_ENDS: dict[str, tuple[str, ...]] = {
    "+": ("wang2019",),
    "-shrunken": ("efron1973",),
    "-private-head": ("jeong2022",),
    "-low-rank": ("wu2024",),
}
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
    >>> of_method("fedprox+"), of_method("fedavg-private-head-shrunken"), of_method("mine")
    (('li2020', 'wang2019'), ('mcmahan2017', 'jeong2022', 'efron1973'), ())
    """
    if name in _METHODS:
        return _METHODS[name]
    for end, keys in _ENDS.items():
        if name.endswith(end) and (inner := of_method(name.removesuffix(end))):
            return (*inner, *(key for key in keys if key not in inner))
    return ()


def of_data(name: str) -> tuple[str, ...]:
    """Keys of the entries for a data set of ``fedstat.data.SOURCES``, () for others.

    Examples
    --------
    >>> of_data("cifar-100:test"), of_data("emnist-balanced"), of_data("my own")
    (('krizhevsky2009',), ('cohen2017',), ())
    """
    known = [base for base in _DATA if name.partition(":")[0] == base or name.startswith(f"{base}-")]
    return _DATA[max(known, key=len)] if known else ()


def bibliography(keys: Iterable[str] | None = None) -> str:
    """BibTeX of some entries, each once, in the order of ``REFERENCES``; of all by default."""
    wanted = set(REFERENCES if keys is None else keys)
    return "\n\n".join(entry.bibtex(key) for key, entry in REFERENCES.items() if key in wanted)

"""Configuration files of envoyproxy/ratelimit: reading, checking and matching.

The keys, their meaning and the errors are those of envoyproxy/ratelimit, except that a key in the wrong place is
rejected instead of ignored, and that key and value of an entry are kept apart: the rule `key: a_b` does not match the
entry ("a", "b"). Rules may also use what its files cannot express: algorithms, bursts, windows, costs, tiers and
overrides of single values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from datetime import timedelta
from hashlib import blake2b
from math import isfinite, isnan
from typing import TYPE_CHECKING, Any, Final

import yaml

from headgate.errors import InvalidInput, InvalidLimit
from headgate.limits import Limit
from headgate.server.envoy import yaml_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "UNITS",
    "UNIT_SECONDS",
    "ConfigError",
    "Configuration",
    "DescriptorRule",
    "DomainRules",
    "RuleNode",
    "limit_name",
    "load",
]

UNITS: Final = {"SECOND": 1, "MINUTE": 2, "HOUR": 3, "DAY": 4, "MONTH": 5, "YEAR": 6, "WEEK": 7}
"""The numbers of units in Envoy's API."""

UNIT_SECONDS: Final = {1: 1, 2: 60, 3: 3600, 4: 86_400, 5: 2_592_000, 6: 31_536_000, 7: 604_800}

_DOMAIN_KEYS: Final = ("domain", "descriptors", "charge_refused", "clients")
_DESCRIPTOR_KEYS: Final = (
    "key",
    "value",
    "descriptors",
    "rate_limit",
    "shadow_mode",
    "quota_mode",
    "detailed_metric",
    "value_to_metric",
    "share_threshold",
    "metadata",
)
_VARIANT_KEYS: Final = ("requests_per_unit", "burst", "unlimited")
_LIMIT_KEYS: Final = (
    *("unit", "requests_per_unit", "unlimited", "name", "replaces", "algorithm", "burst", "window"),
    *("cost", "tiers", "overrides"),
)
_PLACES: Final = {
    **dict.fromkeys(_LIMIT_KEYS, "below rate_limit"),
    **dict.fromkeys(_DESCRIPTOR_KEYS, "in an entry of descriptors"),
    **dict.fromkeys(_DOMAIN_KEYS, "at the top level"),
    "descriptors": "at the top level or in an entry of descriptors",
    "name": "below rate_limit or in an entry of replaces",
}
_MAX_VALUE_IN_ERROR: Final = 10
_GO_EXPONENT_FROM: Final = 1e21
MAX_NAME_LENGTH: Final = 100


class ConfigError(InvalidInput):
    """An invalid configuration file; the message begins with the name of the file."""


@dataclass(slots=True)
class DescriptorRule:
    """The limit of one descriptor in a configuration file."""

    full_key: str
    """Domain, keys and values as in the statistics: "domain.key_value.key"."""
    requests_per_unit: int = 0
    unit: int = 0
    name: str = ""
    replaces: tuple[str, ...] = ()
    unlimited: bool = False
    shadow_mode: bool = False
    quota_mode: bool = False
    detailed_metric: bool = False
    metadata: dict[str, Any] | None = None
    limit: Limit | None = None
    """The limit in Headgate's terms; None if it is unlimited or allows nothing."""
    cost: int = 1
    """The hits that are charged for one hit of a request."""
    origin: str = ""
    """The source of the numbers: "tier", "override", or empty for those of the rule itself."""
    tiers: dict[str, DescriptorRule] = field(default_factory=dict)
    """The same rule with the numbers of each tier."""
    overrides: dict[str, DescriptorRule] = field(default_factory=dict)
    """The same rule with the numbers of single values of its last entry."""

    def for_value(self, value: str, clients: Mapping[str, str]) -> DescriptorRule:
        """The rule for a value of its last entry: its override, that of its tier, or this one."""
        found = self.overrides.get(value) if self.overrides else None
        if found is None and self.tiers:
            found = self.tiers.get(clients.get(value, ""))
        return found or self


@dataclass(slots=True)
class RuleNode:
    """A level of the tree of descriptors."""

    rule: DescriptorRule | None = None
    key: str = ""
    value: str | None = None
    value_to_metric: bool = False
    share_threshold: bool = False
    children: dict[tuple[str, str | None], RuleNode] = field(default_factory=dict)
    """By key and value, None for any value. Patterns are here, too, to detect duplicates."""
    patterns: list[tuple[Callable[[str], Any], Callable[[str], Any], RuleNode]] = field(default_factory=list)
    """Children with an asterisk in the order of the file: tests for key and value."""

    def find(self, key: str, value: str) -> tuple[RuleNode | None, bool]:
        """The child that an entry matches: exactly, by a pattern, or by its key alone; and whether by a pattern."""
        child = self.children.get((key, value)) if value else None
        if child is not None:
            return child, False
        for matches_key, matches_value, each in self.patterns:
            if matches_key(key) and matches_value(value):
                return each, True
        return self.children.get((key, None)), False

    @property
    def label(self) -> str:
        return self.key if self.value is None else f"{self.key}_{self.value}"


@dataclass(slots=True)
class DomainRules:
    """The rules of one domain."""

    root: RuleNode = field(default_factory=RuleNode)
    charge_refused: bool = False
    clients: dict[str, str] = field(default_factory=dict)
    """Tiers by value."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """All domains of a set of files."""

    domains: dict[str, DomainRules]
    version: str = ""
    """A hash of the files."""

    def rules(self) -> Iterable[DescriptorRule]:
        """All rules, in the order of the files."""
        for each in self.domains.values():
            yield from _rules_below(each.root)

    def describe(self) -> str:
        """The rules as text, a line each."""
        units = {number: name for name, number in UNITS.items()}
        return "".join(
            f"{rule.full_key}: unit={units.get(rule.unit, 'UNKNOWN')} requests_per_unit={rule.requests_per_unit}, "
            f"shadow_mode: {str(rule.shadow_mode).lower()}, quota_mode: {str(rule.quota_mode).lower()}\n"
            for rule in self.rules()
        )


def _rules_below(root: RuleNode) -> Iterable[DescriptorRule]:
    stack = [root]
    while stack:
        node = stack.pop()
        if node.rule is not None:
            yield node.rule
        stack.extend(reversed(node.children.values()))


def load(texts: Sequence[tuple[str, str]], *, merge_domains: bool = False) -> Configuration:
    """Read the files, given as pairs of name and text. Raises `ConfigError` at the first problem."""
    documents = [_read(name, text) for name, text in texts]
    domains: dict[str, DomainRules] = {}
    for document in documents:
        document.add_to(domains, merge_domains=merge_domains)
    configuration = Configuration(domains, blake2b(repr(texts).encode(), digest_size=6).hexdigest())
    for document in documents:
        document.check_clients(configuration)
    return configuration


def _read(name: str, text: str) -> _File:
    file = _File(name)
    try:
        root = yaml_values.load(text)
        if root is None or yaml_values.tag_of(root) == "!!null":
            return file
        if not isinstance(root, yaml.MappingNode):
            value = _quoted(root)
            raise file.error(
                "error loading config file: yaml: unmarshal errors:\n  "
                f"line {root.start_mark.line + 1}: cannot unmarshal {value} into map[interface {{}}]interface {{}}"
            )
        file.check_keys(root)
        file.read(root)
    except yaml_values.YamlError as error:
        raise file.error(f"error loading config file: {error}") from None
    return file


def _quoted(node: yaml.Node) -> str:
    """A value in an error of yaml.v2: its tag and, if it is a scalar, the beginning of its text."""
    tag = yaml_values.tag_of(node)
    if not isinstance(node, yaml.ScalarNode):
        return tag
    text = node.value if len(node.value) <= _MAX_VALUE_IN_ERROR else f"{node.value[:7]}..."
    return f"{tag} `{text}`"


class _File:
    """One configuration file."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.domain = ""
        self.charge_refused = False
        self.clients: dict[str, tuple[str, yaml.Node]] = {}
        self.descriptors: list[dict[str, Any]] = []
        self._problems: list[tuple[int, str]] = []
        """Values of the wrong type, with the numbers of their lines."""

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.name}: {text}")

    def check_keys(self, node: yaml.MappingNode) -> None:
        """Check that all keys are known, wherever they are, and that there are no values of unexpected types."""
        known = _PLACES
        for key, (_, value) in yaml_values.fields(node).items():
            if not isinstance(key, str):
                raise self.error(f"config error, key is not of type string: {_go_text(key)}")
            if key not in known:
                raise self.error(f"config error, unknown key '{key}'")
            if key in ("metadata", "clients"):
                continue
            if key in ("tiers", "overrides") and isinstance(value, yaml.MappingNode):
                for _, each in yaml_values.fields(value).values():
                    if isinstance(each, yaml.MappingNode):
                        self.check_keys(each)
                continue
            if isinstance(value, yaml.SequenceNode):
                for each in value.value:
                    if not isinstance(each, yaml.MappingNode):
                        text = _go_text(yaml_values.plain(each))
                        raise self.error(f"config error, yaml file contains list of type other than map: {text}")
                    self.check_keys(each)
            elif isinstance(value, yaml.MappingNode):
                self.check_keys(value)
            elif yaml_values.tag_of(value) == "!!float":
                raise self.error("error checking config")

    def read(self, root: yaml.MappingNode) -> None:
        """Read the values, and report all that have the wrong type together."""
        top = self._fields(root, _DOMAIN_KEYS)
        self.domain = self._text(top.get("domain"))
        self.charge_refused = self._bool(top.get("charge_refused"))
        self.clients = {
            value: (self._text(node), node) for value, node in self._named(top.get("clients"), "clients", "tiers")
        }
        self.descriptors = self._descriptors(top.get("descriptors"))
        if self._problems:
            problems = "".join(f"\n  line {line}: {text}" for line, text in sorted(self._problems, key=_line_of))
            raise self.error(f"error loading config file: yaml: unmarshal errors:{problems}")

    def _fields(self, node: yaml.MappingNode, allowed: tuple[str, ...], rule: str = "") -> dict[str, yaml.Node]:
        found = {}
        for key, (key_node, value) in yaml_values.fields(node, ("rate_limit", "metadata")).items():
            if key not in allowed:
                where = yaml_values.position(key_node)
                raise self.error(
                    f"config error, misplaced key '{key}' at {where}: {rule or f'it belongs {_PLACES[key]}'}"
                )
            found[key] = value
        return found

    def _descriptors(self, node: yaml.Node | None) -> list[dict[str, Any]]:
        made = []
        for each in self._items(node, "[]config.YamlDescriptor"):
            values = self._fields(each, _DESCRIPTOR_KEYS)
            limit = values.get("rate_limit")
            made.append(
                {
                    "key": self._text(values.get("key")),
                    "value": self._text(values.get("value")),
                    "rate_limit": self._rate_limit(limit),
                    "descriptors": self._descriptors(values.get("descriptors")),
                    "metadata": self._metadata(values.get("metadata")),
                    "node": each,
                    **{
                        name: self._bool(values.get(name))
                        for name in ("shadow_mode", "quota_mode", "detailed_metric", "value_to_metric")
                    },
                    "share_threshold": self._bool(values.get("share_threshold")),
                }
            )
        return made

    def _rate_limit(self, node: yaml.Node | None) -> dict[str, Any] | None:
        if node is None or yaml_values.tag_of(node) == "!!null":
            return None
        if not isinstance(node, yaml.MappingNode):
            self._mismatch(node, "config.YamlRateLimit")
            return None
        values = self._fields(node, _LIMIT_KEYS)
        return {
            "unit": self._text(values.get("unit")),
            "requests_per_unit": self._uint32(values.get("requests_per_unit")),
            "unlimited": self._bool(values.get("unlimited")),
            "name": self._text(values.get("name")),
            "replaces": [
                self._text(self._fields(each, ("name",)).get("name"))
                for each in self._items(values.get("replaces"), "[]config.yamlReplaces")
            ],
            "algorithm": self._text(values.get("algorithm")),
            "burst": self._uint32(values.get("burst")),
            "window": self._text(values.get("window")),
            "cost": self._cost(values.get("cost")),
            "tiers": self._variants(values.get("tiers"), "tiers"),
            "overrides": self._variants(values.get("overrides"), "overrides"),
            "node": node,
        }

    def _cost(self, node: yaml.Node | None) -> int:
        cost = 1 if node is None else self._uint32(node)
        if node is not None and not cost and not self._problems:
            where = yaml_values.position(node)
            raise self.error(f"config error, cost 0 at {where}: give at least 1, or use unlimited: true")
        return cost

    def _variants(self, node: yaml.Node | None, name: str) -> dict[str, dict[str, Any]]:
        """The numbers of tiers or of single values, by name."""
        found = {}
        for value, each in self._named(node, name, "limits"):
            where = f"'{value}' in {name} at {yaml_values.position(each)}"
            if not isinstance(each, yaml.MappingNode):
                raise self.error(f"config error, {where}: give a limit, such as {{requests_per_unit: 100}}")
            values = self._fields(each, _VARIANT_KEYS, f"the limits of {name} accept {', '.join(_VARIANT_KEYS)}")
            unlimited = self._bool(values.get("unlimited"))
            if unlimited == ("requests_per_unit" in values):
                raise self.error(f"config error, {where}: give either requests_per_unit or unlimited: true")
            found[value] = {
                "requests_per_unit": self._uint32(values.get("requests_per_unit")),
                "burst": self._uint32(values.get("burst")),
                "unlimited": unlimited,
                "node": each,
            }
        return found

    def _named(self, node: yaml.Node | None, name: str, content: str) -> list[tuple[str, yaml.Node]]:
        """The entries of a mapping from values to something. Values are texts, as those of descriptors."""
        if node is None or yaml_values.tag_of(node) == "!!null":
            return []
        if not isinstance(node, yaml.MappingNode):
            where = yaml_values.position(node)
            raise self.error(f"config error, {name} at {where}: give a mapping from names to {content}")
        return [(str(key.value), value) for key, value in yaml_values.fields(node).values()]

    def _items(self, node: yaml.Node | None, go_type: str) -> list[yaml.MappingNode]:
        if node is None or yaml_values.tag_of(node) == "!!null":
            return []
        if not isinstance(node, yaml.SequenceNode):
            self._mismatch(node, go_type)
            return []
        return list(node.value)

    def _text(self, node: yaml.Node | None) -> str:
        if node is None or yaml_values.tag_of(node) == "!!null":
            return ""
        if not isinstance(node, yaml.ScalarNode):
            self._mismatch(node, "string")
            return ""
        return str(node.value)

    def _bool(self, node: yaml.Node | None) -> bool:
        value = None if node is None else yaml_values.plain(node)
        if node is not None and value is not None and not isinstance(value, bool):
            self._mismatch(node, "bool")
        return value is True

    def _uint32(self, node: yaml.Node | None) -> int:
        value = None if node is None else yaml_values.plain(node)
        if node is None or value is None:
            return 0
        if type(value) is not int or not 0 <= value < 2**32:
            self._mismatch(node, "uint32")
            return 0
        return value

    def _metadata(self, node: yaml.Node | None) -> dict[str, Any] | None:
        if node is None or yaml_values.tag_of(node) == "!!null":
            return None
        if not isinstance(node, yaml.MappingNode):
            self._mismatch(node, "map[string]interface {}")
            return None
        # Keys of the first level are texts as written, and those below it the text of a value.
        return {self._text(key): _json(yaml_values.plain(each)) for key, each in yaml_values.fields(node).values()}

    def _mismatch(self, node: yaml.Node, go_type: str) -> None:
        self._problems.append((node.start_mark.line + 1, f"cannot unmarshal {_quoted(node)} into {go_type}"))

    def add_to(self, domains: dict[str, DomainRules], *, merge_domains: bool) -> None:
        """Build the tree of the file's domain."""
        if not self.domain:
            raise self.error("config file cannot have empty domain")
        if self.domain in domains and not merge_domains:
            raise self.error(f"duplicate domain '{self.domain}' in config file")
        rules = domains.setdefault(self.domain, DomainRules())
        rules.charge_refused |= self.charge_refused
        for value, (tier, node) in self.clients.items():
            other = rules.clients.setdefault(value, tier)
            if other != tier:
                where = yaml_values.position(node)
                raise self.error(
                    f"config error, tier '{tier}' of client '{value}' at {where}: another file has tier '{other}'"
                )
        self._add(rules.root, f"{self.domain}.", self.descriptors)

    def check_clients(self, configuration: Configuration) -> None:
        """Check that all tiers of clients exist in the domain, whose rules may be in several files."""
        if not self.clients:
            return
        root = configuration.domains[self.domain].root
        known = sorted({tier for rule in _rules_below(root) for tier in rule.tiers})
        for value, (tier, node) in self.clients.items():
            if tier not in known:
                where = yaml_values.position(node)
                remedy = f"use one of {', '.join(known)}" if known else "add it below tiers of a rate_limit"
                raise self.error(f"config error, unknown tier '{tier}' of client '{value}' at {where}: {remedy}")

    def _add(self, parent: RuleNode, prefix: str, descriptors: list[dict[str, Any]]) -> None:
        for each in descriptors:
            if not each["key"]:
                raise self.error("descriptor has empty key")
            node = RuleNode(key=each["key"], value=each["value"] or None)
            full_key = prefix + node.label
            index = node.key, node.value
            if index in parent.children:
                raise self.error(f"duplicate descriptor composite key '{full_key}'")
            node.rule = self._rule(full_key, each)
            if each["share_threshold"] and "*" not in node.label:
                raise self.error(
                    "share_threshold can only be used with wildcard values (containing '*'), "
                    f"but found key '{node.label}'"
                )
            node.value_to_metric, node.share_threshold = each["value_to_metric"], each["share_threshold"]
            if "*" in node.label:
                value_pattern = _pattern(node.value) if node.value is not None else _matches_all
                parent.patterns.append((_pattern(node.key), value_pattern, node))
            self._add(node, f"{full_key}.", each["descriptors"])
            parent.children[index] = node

    def _rule(self, full_key: str, descriptor: dict[str, Any]) -> DescriptorRule | None:
        settings = descriptor["rate_limit"]
        if settings is None:
            return None
        unit = UNITS.get(settings["unit"].upper(), 0)
        if settings["unlimited"]:
            if unit:
                raise self.error("should not specify rate limit unit when unlimited")
        elif not unit and not settings["window"]:
            raise self.error(f"invalid rate limit unit '{settings['unit']}'")
        for name in settings["replaces"]:
            if not name:
                raise self.error("should not have an empty replaces entry")
            if name == settings["name"]:
                raise self.error("replaces should not contain name of same descriptor")
        rule = DescriptorRule(
            full_key,
            settings["requests_per_unit"],
            unit,
            settings["name"],
            tuple(settings["replaces"]),
            settings["unlimited"],
            descriptor["shadow_mode"],
            descriptor["quota_mode"],
            descriptor["detailed_metric"],
            descriptor["metadata"],
            self._limit(full_key, unit, settings),
            settings["cost"],
        )
        if rule.limit is not None and rule.cost > rule.limit.capacity:
            where = yaml_values.position(settings["node"])
            raise self.error(
                f"config error, rate_limit at {where}: cost {rule.cost} exceeds {rule.limit.capacity}, the most that "
                "can be left, so that no request would ever pass; lower cost, or raise the limit"
            )
        for origin, variants in (("tier", settings["tiers"]), ("override", settings["overrides"])):
            if variants and (rule.unlimited or descriptor["share_threshold"]):
                where, reason = yaml_values.position(settings["node"]), "an unlimited rule has no numbers to change"
                if descriptor["share_threshold"]:
                    reason = "values that share a counter by share_threshold have the same limit"
                raise self.error(f"config error, {origin}s of the rate_limit at {where}: {reason}")
        rule.tiers = {name: self._variant(rule, each, settings, "tier") for name, each in settings["tiers"].items()}
        rule.overrides = {
            value: self._variant(rule, each, settings, "override") for value, each in settings["overrides"].items()
        }
        return rule

    def _variant(
        self, rule: DescriptorRule, numbers: dict[str, Any], settings: dict[str, Any], origin: str
    ) -> DescriptorRule:
        """A rule with other numbers: unit, window and algorithm are those of the rule."""
        limit = self._limit(rule.full_key, rule.unit, {**settings, **numbers})
        requests, unlimited = numbers["requests_per_unit"], numbers["unlimited"]
        return replace(rule, requests_per_unit=requests, unlimited=unlimited, limit=limit, origin=origin)

    def _limit(self, full_key: str, unit: int, settings: dict[str, Any]) -> Limit | None:
        if settings["unlimited"] or not settings["requests_per_unit"]:
            return None
        quota, name = settings["requests_per_unit"], limit_name(full_key)
        try:
            algorithm = settings["algorithm"] or "fixed_window"
            if settings["window"]:
                if unit:
                    raise InvalidLimit("give either unit or window")
                period = Limit.parse(f"1 per {settings['window']}, {algorithm}").period
            else:
                period = timedelta(seconds=UNIT_SECONDS[unit])
            if algorithm == "concurrency":
                raise InvalidLimit("Envoy does not report when a request ends, so concurrency cannot be limited")
            return Limit(quota, period, burst=settings["burst"] or None, algorithm=algorithm, name=name)
        except InvalidLimit as error:
            where = yaml_values.position(settings["node"])
            raise self.error(f"config error, rate_limit at {where}: {error}") from None


def limit_name(full_key: str) -> str:
    """The name of a limit in metrics, the decision log and the store."""
    name = full_key.encode("ascii", "backslashreplace").decode()
    name = "".join(character if character.isprintable() else "?" for character in name)
    if len(name) <= MAX_NAME_LENGTH and name == full_key:
        return name
    digest = blake2b(full_key.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{name[: MAX_NAME_LENGTH - len(digest) - 1]}~{digest}"


def _pattern(text: str) -> Callable[[str], Any]:
    """A test for a text in which each asterisk stands for any characters."""
    if "*" not in text:
        return text.__eq__
    return re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL).fullmatch


def _matches_all(_: str) -> bool:
    return True


def _line_of(problem: tuple[int, str]) -> int:
    return problem[0]


def _json(value: Any) -> Any:
    """A value with texts as keys, as in JSON."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else _go_text(key): _json(each) for key, each in value.items()}
    return [_json(each) for each in value] if isinstance(value, list) else value


def _go_text(value: object) -> str:
    """A value as Go's fmt prints it."""
    if isinstance(value, float):
        return _go_float(value)
    if value is None:
        return "<nil>"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{' '.join(map(_go_text, value))}]"
    if isinstance(value, dict):
        return f"map[{' '.join(f'{_go_text(key)}:{_go_text(each)}' for key, each in sorted(value.items(), key=str))}]"
    return str(value)


def _go_float(number: float) -> str:
    """A float as Go's fmt prints it: without ".0", and with an exponent only from 1e+21 on."""
    if not isfinite(number):
        return "NaN" if isnan(number) else "+Inf" if number > 0 else "-Inf"
    if number.is_integer() and abs(number) < _GO_EXPONENT_FROM:
        return str(int(number))
    return repr(number)

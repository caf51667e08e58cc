// The sentences of runs in the user's language. Python says them in English; locales/*/main.json has, under "int8_dit",
// English patterns with {placeholders} and what each becomes.
//
// A placeholder that is called n, n2, n3 stands for a number, {kind} for words of one clause, any other for any words.
// Words are translated in turn.
// What has no pattern is cut at its sentences, then at its clauses, of which some following ones may be known together;
// what is not known then stays English.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const PACK = "int8_dit";
const OPTIONS = "int8_dit_options"; // what widgets can be set to
const NUMBER = String.raw`[-+]?\d[\d.,]*?`;
const KIND = "kind";
const PLACEHOLDER = /\{(\w+)\}/;
const PLACEHOLDERS = new RegExp(PLACEHOLDER, "g");
// Where texts are cut, the outermost first, never inside of parentheses. The catalog has what stands there instead, and
// what parentheses are.
const CUTS = ["\n", ". ", ": ", "; ", ", "];
const FULL_STOP = ".";
const JOINS = 8; // a pattern with fewer characters of its own joins words, "{one} and {other}", and no clauses
// What a placeholder at a pattern's beginning and at its end does not stand for: a file's name and more, the next clause.
const BEFORE = [". ", ": "];
const BEHIND = [". ", ": ", "; ", ", "];
const TOGETHER = 3; // pieces beside each other that can have one pattern
const REMARK = /^(.+?) \((.+)\)(\.?)$/s; // "fp32 (protected)"

const catalogs = {}; // by language

/** Read the catalogs of all languages; until then and where that fails texts stay English. */
export async function loadTranslations() {
  try {
    const answer = await api.fetchApi("/i18n");
    for (const [language, messages] of Object.entries(await answer.json())) {
      if (!messages[PACK]) continue;
      const { [OPTIONS]: options = {}, nodeDefs = {} } = messages;
      catalogs[language] = { ...compiled(messages[PACK]), options, nodeDefs };
    }
  } catch (error) {
    console.warn("INT8 DiT: the translations could not be read:", error);
  }
}

function compiled(texts) {
  const patterns = Object.entries(texts).map(([english, translation]) => {
    const parts = english.split(PLACEHOLDER); // literal, name, literal, …
    const names = parts.filter((_, index) => index % 2);
    const source = parts.map((part, index) => (index % 2 ? `(${/^n\d*$/.test(part) ? NUMBER : ".+?"})` : escaped(part)));
    const literals = parts.filter((_, index) => index % 2 === 0);
    const literal = literals.join("").length;
    const [longest] = literals.toSorted((one, other) => other.length - one.length);
    const ends = [!parts.at(0) && BEFORE, !parts.at(-1) && BEHIND];
    const [first, last] = ends.map((cuts) => (cuts || []).filter((cut) => !english.includes(cut)));
    return { names, english, translation, literal, longest, first, last, regex: new RegExp(`^${source.join("")}$`, "s") };
  });
  // The most that is said literally fits best.
  patterns.sort((one, other) => other.literal - one.literal);
  return { texts, patterns: patterns.filter(({ names }) => names.length) };
}

const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
const withFirst = (text, change) => text.charAt(0)[change]() + text.slice(1);

const catalogOfUser = () => catalogs[app.extensionManager.setting.get("Comfy.Locale")];

/** Show what a node's widgets are set to in the user's language; their values stay what workflows hold. */
export function translateOptions(node) {
  for (const widget of node.widgets ?? []) {
    if (widget.type !== "combo") continue;
    const nothing = "nothing saved yet"; // where a list of files is empty
    widget.options.getOptionLabel = (value) => catalogOfUser()?.options[value] ?? value ?? translated(nothing);
  }
}

/** What an input of a node is called in each language, the user's first; undefined in English, where ids say it. */
export function namesOfInput(type, input) {
  const name = (catalog) => catalog?.nodeDefs[type]?.inputs?.[input]?.name;
  return [name(catalogOfUser()), undefined, ...Object.values(catalogs).map(name)];
}

/** A text of the pack in the user's language; what is not known in it stays as it is. */
export function translated(text) {
  const catalog = catalogOfUser();
  return catalog && typeof text === "string" ? (known(text, catalog) ?? pieces(text, catalog, 0)) : text;
}

/**
 * The translation of a whole text; undefined where it has none. Patterns have no full stop at their end. Of pieces that
 * are put together a pattern says the separator itself.
 */
function known(text, { texts, patterns, options }, separator = "") {
  const stop = text.endsWith(FULL_STOP) ? FULL_STOP : "";
  const bare = stop ? text.slice(0, -stop.length) : text;
  for (const form of new Set([bare, withFirst(bare, "toLowerCase"), withFirst(bare, "toUpperCase")])) {
    const whole = [texts, options].find((one) => Object.hasOwn(one, form));
    if (whole) return whole[form] + (stop && texts[stop]);
    for (const { regex, names, english, translation, literal, longest, first, last } of patterns) {
      if (!form.includes(longest) || !english.includes(separator)) continue; // much quicker than the regex
      const values = regex.exec(form)?.slice(1);
      if (!values || (literal < JOINS && values.some((value) => /[,;:(]/.test(value)))) continue;
      if (!values.every(isBalanced)) continue;
      if (holdsAny(values.at(0), first) || holdsAny(values.at(-1), last)) continue;
      if (names.includes(KIND) && holdsAny(values[names.indexOf(KIND)], [", "])) continue;
      const inWords = Object.fromEntries(names.map((name, index) => [name, translated(values[index])]));
      return translation.replaceAll(PLACEHOLDERS, (all, name) => inWords[name] ?? all) + (stop && texts[stop]);
    }
  }
}

/** Whether each parenthesis in a text is closed in it. */
const isBalanced = (text) => !/[()]/.test(text.replaceAll(/\([^()]*\)/g, "").replaceAll(/\([^()]*\)/g, ""));

const holdsAny = (text, cuts) => cuts.some((cut) => cutAt(text, cut).length > 1);

/** The text cut at the first of CUTS it has, from number `first` on, each piece translated. */
function pieces(text, catalog, first) {
  for (let cut = first; cut < CUTS.length; cut++) {
    const parts = cutAt(text, CUTS[cut]);
    if (parts.length === 1) continue;
    const done = [];
    for (let at = 0; at < parts.length; ) {
      const [length, text] = knownTogether(parts, at, CUTS[cut], catalog) ?? [1, pieces(parts[at], catalog, cut + 1)];
      done.push(text);
      at += length;
    }
    if (done.length === parts.length && done.every((part, index) => part === parts[index])) continue;
    return done.join(catalog.texts[CUTS[cut]] ?? CUTS[cut]);
  }
  const [, said, remark, stop] = REMARK.exec(text) ?? [];
  const both = said && [translated(said), translated(remark)];
  if (!both || (both[0] === said && both[1] === remark)) return text;
  const [open, close] = [" (", ")"].map((mark) => catalog.texts[mark] ?? mark);
  return `${both[0]}${open}${both[1]}${close}${stop && (catalog.texts[stop] ?? stop)}`;
}

/** How many of the pieces from one on are known as one text, and its translation; undefined where not even that one. */
function knownTogether(parts, at, separator, catalog) {
  for (let length = Math.min(TOGETHER, parts.length - at); length > 0; length--) {
    const text = known(parts.slice(at, at + length).join(separator), catalog, length > 1 ? separator : "");
    if (text !== undefined) return [length, text];
  }
}

function cutAt(text, separator) {
  const parts = [""];
  let depth = 0;
  for (let at = 0; at < text.length; at++) {
    depth += { "(": 1, ")": -1 }[text[at]] ?? 0;
    if (depth === 0 && text.startsWith(separator, at)) {
      parts.push("");
      at += separator.length - 1;
    } else parts[parts.length - 1] += text[at];
  }
  return parts;
}

// SPDX-License-Identifier: Apache-2.0
// JSON as section 2.1 restricts it. A parser of our own, because JSON.parse hides duplicate keys and number forms.
import { Failure, check } from './failure.mjs';

const MAX_DEPTH = 16;
const MAX_STRING = 4096;
const MAX_VALUES = 1_048_576;
const KEY = /^[a-z0-9][a-z0-9_.-]{0,63}$/;
const ESCAPES = { '"': '"', '\\': '\\', '/': '/', b: '\b', f: '\f', n: '\n', r: '\r', t: '\t' };

/** Parse the bytes of a manifest. Objects have no prototype, so that a key "constructor" is a key like any other. */
export function parse(bytes) {
  let text;
  try {
    text = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes); // keeps a BOM, which then fails
  } catch {
    throw new Failure('manifest.json', 'manifest', 'not well-formed UTF-8 (JSN-1)');
  }
  let at = 0;
  let values = 1; // one more than commas and opening brackets (JSN-12)
  const count = () => check(++values <= MAX_VALUES, 'limit.exceeded', 'manifest', `more than ${MAX_VALUES} values`);
  const bad = (why) => new Failure('manifest.json', 'manifest', `${why}, character ${at}`);
  const space = () => {
    while (text[at] === ' ' || text[at] === '\n' || text[at] === '\r' || text[at] === '\t') at++;
  };
  const skip = (character) => {
    if (text[at] !== character) throw bad(`expected ${character}`);
    at++;
  };

  function hexUnit(from) {
    const digits = text.slice(from + 2, from + 6);
    if (!/^[0-9a-fA-F]{4}$/.test(digits)) throw bad('bad \\u escape');
    return parseInt(digits, 16);
  }

  function string() {
    skip('"');
    let out = '';
    for (;;) {
      let stop = at; // copy plain runs at once
      while (stop < text.length && text[stop] !== '"' && text[stop] !== '\\' && text[stop] >= ' ') stop++;
      out += text.slice(at, stop);
      at = stop;
      if (text[at] === '"') break;
      if (text[at] !== '\\') throw bad('control character or end inside a string');
      const escape = text[at + 1];
      if (escape === 'u') {
        const unit = hexUnit(at);
        const pair = unit >= 0xd800 && unit <= 0xdbff && text.startsWith('\\u', at + 6) ? hexUnit(at + 6) : 0;
        const isPair = pair >= 0xdc00 && pair <= 0xdfff; // one code point above U+FFFF, though not canonical
        if (unit >= 0xd800 && unit <= 0xdfff && !isPair) throw bad('surrogate (JSN-5)');
        out += isPair ? String.fromCharCode(unit, pair) : String.fromCharCode(unit);
        at += isPair ? 12 : 6;
      } else {
        if (!Object.hasOwn(ESCAPES, escape ?? '')) throw bad('bad escape');
        out += ESCAPES[escape];
        at += 2;
      }
    }
    at++;
    check(Buffer.byteLength(out) <= MAX_STRING, 'limit.exceeded', 'manifest', `string above ${MAX_STRING} bytes`);
    return out;
  }

  function number() {
    const form = /[-+0-9.eE]+/y;
    form.lastIndex = at;
    const digits = form.exec(text)[0];
    if (!/^(0|[1-9][0-9]*)$/.test(digits)) throw bad('number with sign, fraction, exponent or leading zero (JSN-4)');
    at += digits.length;
    check(digits.length <= 16 && Number(digits) <= Number.MAX_SAFE_INTEGER, 'limit.exceeded', 'manifest',
      'integer above 2^53 - 1');
    return Number(digits);
  }

  function value(depth) {
    space();
    const first = text[at];
    if (first === '"') return string();
    if (first === '-' || (first >= '0' && first <= '9')) return number();
    if (first === '{' || first === '[') {
      check(depth <= MAX_DEPTH, 'limit.exceeded', 'manifest', `nested deeper than ${MAX_DEPTH}`);
      at++;
      count();
      const out = first === '[' ? [] : Object.create(null);
      const close = first === '[' ? ']' : '}';
      space();
      if (text[at] === close) { at++; return out; }
      for (;;) {
        if (first === '[') out.push(value(depth + 1));
        else member(out, depth);
        space();
        if (text[at] === close) { at++; return out; }
        skip(',');
        count();
      }
    }
    for (const [word, meaning] of [['true', true], ['false', false], ['null', null]]) {
      if (text.startsWith(word, at)) { at += word.length; return meaning; }
    }
    throw bad('expected a value');
  }

  function member(out, depth) {
    space();
    const key = string();
    if (!KEY.test(key)) throw bad('key of another form (JSN-6)');
    check(!(key in out), 'manifest.duplicate-key', 'manifest', `key ${key} twice, character ${at}`);
    space();
    skip(':');
    out[key] = value(depth + 1);
  }

  space();
  if (text[at] !== '{') throw bad('expected an object (JSN-2)');
  const top = value(1);
  space();
  if (at !== text.length) throw bad('more after the end');
  return top;
}

/** The canonical form (JSN-7). JSON.stringify of one string happens to write exactly the escapes it allows. */
export function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join(',')}]`;
  if (value === null || typeof value !== 'object') return JSON.stringify(value);
  const members = Object.keys(value).sort().map((key) => `${JSON.stringify(key)}:${canonical(value[key])}`);
  return `{${members.join(',')}}`;
}

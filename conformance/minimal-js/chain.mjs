// SPDX-License-Identifier: Apache-2.0
// The prefix chain (section 6.2), recomputed over the ids that a caller expects.
import { deriveKey, keyed } from './digest.mjs';
import { Failure, check } from './failure.mjs';
import { canonical } from './json.mjs';

export const BLOCK = 256;
const NOT_TEXT = 2 ** 32 - 1; // TOK-6

const inSpan = (spans, position) => spans.some(({ start, count }) => position >= start && position < start + count);

/** The first position whose id cannot stand, or -1; ids at positions of content spans may be any. */
export const findIllegal = (ids, spans) =>
  ids.findIndex((id, i) => !Number.isInteger(id) || ((id < 0 || id >= NOT_TEXT) && !inSpan(spans, i)));

/** h(0), then one block of positions after the other (TOK-1 to TOK-4). */
export class Chain {
  #key;

  constructor(identity, salt) {
    this.#key = deriveKey('kvformat 0.9 token chain', salt);
    this.link = keyed(this.#key, Buffer.from(canonical(identity)));
  }

  /** Positions [start, stop) of `ids`; `spans` are all content spans of the sequence. Returns the link in hexadecimal. */
  add(ids, start, stop, spans = []) {
    const shared = spans.filter((span) => span.start < stop && span.start + span.count > start);
    const bytes = Buffer.alloc(36 + 4 * (stop - start));
    this.link.copy(bytes);
    bytes.writeUInt32LE(stop - start, 32);
    for (let i = start; i < stop; i++) bytes.writeUInt32LE(inSpan(shared, i) ? NOT_TEXT : ids[i], 36 + 4 * (i - start));
    const parts = [bytes];
    for (const span of shared) {
      const numbers = Buffer.alloc(16);
      numbers.writeBigUInt64LE(BigInt(span.start));
      numbers.writeBigUInt64LE(BigInt(span.count), 8);
      parts.push(Buffer.from(span.digest.split(':')[1], 'hex'), numbers);
    }
    this.link = keyed(this.#key, Buffer.concat(parts));
    return this.link.toString('hex');
  }
}

/**
 * The verified length (TOK-10) for expected ids from position 0 on, and the content spans of the same sequence, null if
 * the caller gives none: then all ids are text, and spans of the artifact end what can be verified (TOK-15).
 */
export function verifiedLength(m, ids, spans, salt) {
  const { chain, content, count: T, first_position: first } = m.tokens;
  const other = (detail) => new Failure('identity.tokens', '/tokens/chain', detail);
  check(chain !== null, 'identity.missing', '/tokens/chain', 'the artifact does not say which tokens it holds');
  if (chain.salted !== salt.length > 0) throw other('the chain is salted and no salt is given, or the other way round');
  if (first > ids.length) throw other(`the artifact starts at position ${first}, but only ${ids.length} ids are expected`);

  // A block with a span without digest has no link, neither in the artifact nor here.
  const open = spans?.find((span) => span.digest === null)?.start ?? Infinity;
  if (open < first) throw other('expected content without digest lies before the artifact');
  const links = new Chain(m.identity, salt);
  for (let at = 0; at < first; at += BLOCK) links.add(ids, at, at + BLOCK, spans ?? []);
  if (chain.parent !== null && links.link.toString('hex') !== chain.parent) throw other('it continues another sequence (TOK-14)');

  const given = Math.min(ids.length - first, T);
  const text = spans === null && content.length > 0 ? Math.floor((content[0].start - first) / BLOCK) * BLOCK : T;
  const bound = Math.min(text, open - first);
  let verified = 0;
  let differs = false;
  for (let i = 0; i < chain.hashes.length && !differs; i++) {
    const stop = Math.min(BLOCK * (i + 1), T);
    if (stop > given || stop > bound) break;
    differs = links.add(ids, first + verified, first + stop, spans ?? []) !== chain.hashes[i];
    if (!differs) verified = stop;
  }
  if (verified === 0 && T > 0) throw other('other tokens, or fewer than a block of them (TOK-11)');
  return { verified, differs };
}

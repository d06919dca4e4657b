// SPDX-License-Identifier: Apache-2.0
// The prefix chain (section 6.2), recomputed over the ids that a caller expects.
import { deriveKey, keyed } from './digest.mjs';
import { Failure, check } from './failure.mjs';
import { canonical } from './json.mjs';

const BLOCK = 256;

/**
 * The verified length (TOK-10) for expected ids from position 0 on. The command line has no way to give content
 * spans, so all ids are text and spans of the artifact end what can be verified (TOK-15).
 */
export function verifiedLength(m, ids, salt) {
  const { chain, content, count: T, first_position: first } = m.tokens;
  const other = (detail) => new Failure('identity.tokens', '/tokens/chain', detail);
  check(chain !== null, 'identity.missing', '/tokens/chain', 'the artifact does not say which tokens it holds');
  if (chain.salted !== salt.length > 0) throw other('the chain is salted and no salt is given, or the other way round');
  if (first > ids.length) throw other(`the artifact starts at position ${first}, but only ${ids.length} ids are expected`);

  const key = deriveKey('kvformat 0.9 token chain', salt);
  let link = keyed(key, Buffer.from(canonical(m.identity)));
  const add = (start, stop) => {
    const bytes = Buffer.alloc(36 + 4 * (stop - start));
    link.copy(bytes);
    bytes.writeUInt32LE(stop - start, 32);
    for (let i = start; i < stop; i++) bytes.writeUInt32LE(ids[i], 36 + 4 * (i - start));
    link = keyed(key, bytes);
  };
  for (let at = 0; at < first; at += BLOCK) add(at, at + BLOCK);
  if (chain.parent !== null && link.toString('hex') !== chain.parent) throw other('it continues another sequence (TOK-14)');

  const given = Math.min(ids.length - first, T);
  const bound = content.length ? Math.floor((content[0].start - first) / BLOCK) * BLOCK : T;
  let verified = 0;
  let differs = false;
  for (let i = 0; i < chain.hashes.length && !differs; i++) {
    const stop = Math.min(BLOCK * (i + 1), T);
    if (stop > given || stop > bound) break;
    add(first + verified, first + stop);
    differs = link.toString('hex') !== chain.hashes[i];
    if (!differs) verified = stop;
  }
  if (verified === 0 && T > 0) throw other('other tokens, or fewer than a block of them (TOK-11)');
  return { verified, differs };
}

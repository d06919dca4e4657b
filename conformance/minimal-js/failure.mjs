// SPDX-License-Identifier: Apache-2.0
// Every answer but "ok" is a Failure with a code of the registry; the code decides the verdict.

const VERDICTS = {
  'profile.missing': 'unsupported', 'profile.content': 'invalid',
  header: 'invalid', file: 'invalid', manifest: 'invalid', table: 'invalid', set: 'invalid',
  segment: 'invalid', data: 'invalid', limit: 'invalid',
  version: 'unsupported', feature: 'unsupported', extension: 'unsupported', codec: 'unsupported', track: 'unsupported',
  identity: 'mismatch', tokens: 'mismatch',
  io: 'io_error', usage: 'usage', input: 'usage',
};
export const EXIT = { ok: 0, usage: 64, invalid: 65, unsupported: 69, io_error: 74, mismatch: 76 };

export class Failure extends Error {
  constructor(code, where, detail) {
    super(detail);
    this.code = code;
    this.where = where;
    this.verdict = VERDICTS[code] ?? VERDICTS[code.split('.')[0]];
  }
}

/** Throw a Failure unless the condition holds. */
export function check(condition, code, where, detail) {
  if (!condition) throw new Failure(code, where, detail);
}

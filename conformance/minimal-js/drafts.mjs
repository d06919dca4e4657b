// SPDX-License-Identifier: Apache-2.0
// Files that become visible whole or not at all (ERR-4, PUB-1 to PUB-6).
import { randomBytes } from 'node:crypto';
import { unlinkSync } from 'node:fs';
import { link, open, stat } from 'node:fs/promises';
import { Failure } from './failure.mjs';

const paths = new Set(); // of drafts that exist

function remove(path) {
  try {
    unlinkSync(path);
  } catch {
    // gone already, or the folder is: nothing to be done
  }
  paths.delete(path);
}

for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP']) {
  process.once(signal, () => {
    for (const path of paths) remove(path);
    process.kill(process.pid, signal); // the handler is gone, so this ends the process
  });
}

/**
 * `run(draft)` writes to one or more drafts beside `output`, each `await draft()`, and returns {file, ...result}: `file`
 * becomes the output, unless there is one by then. All drafts are removed.
 */
export async function publish(output, run) {
  const exists = () => new Failure('io.exists', output, 'the target exists');
  if (await stat(output).then(() => true, () => false)) throw exists();
  const drafts = [];
  const draft = async () => {
    const path = `${output}.${randomBytes(6).toString('hex')}.part`;
    paths.add(path);
    const file = await open(path, 'wx+');
    drafts.push({ path, file });
    return file;
  };
  try {
    const { file, ...result } = await run(draft);
    await file.sync();
    await link(drafts.find((d) => d.file === file).path, output); // fails if the target has come to exist, which a rename would not
    return result;
  } catch (error) {
    if (error.code === 'EEXIST') throw exists();
    if (error instanceof Failure || error.syscall === undefined) throw error;
    throw new Failure('io.write', output, error.message);
  } finally {
    for (const { path, file } of drafts) {
      await file.close().catch(() => {});
      remove(path);
    }
  }
}

export async function writeAll(file, bytes, position) {
  for (let done = 0; done < bytes.length;) {
    done += (await file.write(bytes, done, bytes.length - done, position + done)).bytesWritten;
  }
}

import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    environment: 'jsdom',
    include: ['tests/**/*.spec.{ts,tsx}'],
    // JupyterLab's packages are ES modules that import CSS and leave out file extensions: Vite has
    // to read them, Node cannot.
    server: { deps: { inline: [/@jupyterlab/, /@jupyter\//, /@lumino/, /@microsoft/] } },
    // All files share one environment in each worker: reading JupyterLab's packages takes longer than
    // the tests, and no test may leave anything behind in them anyway.
    isolate: false,
    setupFiles: ['tests/setup.ts'],
    testTimeout: 20_000
  }
});

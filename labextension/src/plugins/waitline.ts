/**
 * Draws the waiting line below the cell that waits. It is no output of the cell: it is in no model,
 * so it is not saved with the notebook. See docs/internals/kernel.md.
 */

import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import type { Kernel, KernelMessage } from '@jupyterlab/services';
import type { Widget } from '@lumino/widgets';

import { trans } from '../model/translation';

import { CommandIds, IKiwi } from './token';

/** Prefix of the kernel's comm ids of waiting lines (kiwi_jupyter/kernel/display.py). */
const WAIT_ID = 'kiwi-wait-';
const CLASS = 'jp-kiwiWaitLine';

/** The output of a cell that shows a widget of ipywidgets. */
const WIDGET_VIEW = 'application/vnd.jupyter.widget-view+json';

/** The parts of a code cell that are used here. */
export interface ICell {
  readonly node: HTMLElement;
  readonly model: { readonly id: string; readonly executionState?: string };
  readonly outputArea?: {
    readonly node: HTMLElement;
    readonly model: {
      readonly length: number;
      get(index: number): { readonly data: { readonly [mime: string]: unknown } };
    };
    readonly rendermime: {
      createRenderer(type: string): {
        readonly node: HTMLElement;
        renderModel(model: unknown): Promise<void>;
        dispose(): void;
      };
      createModel(options: { data: Record<string, string>; trusted: boolean }): unknown;
    };
  };
}

/**
 * A kernel's message about one wait; an empty `html`: the wait is over. `cell` is `null` if the
 * request named no cell, because the server runs the cells and not this page.
 */
export interface IWait {
  readonly id: string;
  readonly cell: string | null;
  /** The model of the widget whose callback waits; `null`: a cell waits. */
  readonly widget: string | null;
  readonly html: string;
}

export const waitLine: JupyterFrontEndPlugin<void> = {
  id: 'kiwi-jupyter:wait-line',
  description: 'Shows below a cell that it waits for the GPU.',
  autoStart: true,
  requires: [IKiwi],
  activate: (app: JupyterFrontEnd, kiwi: IKiwi): void => {
    const explain = () => void app.commands.execute(CommandIds.openPanel);
    const lines = new WeakMap<Kernel.IKernelConnection, WaitLines>();
    const follow = (widget: Widget, kernel: Kernel.IKernelConnection) => {
      if (lines.has(kernel)) {
        return;
      }
      const drawn = new WaitLines(() => cellsOf(widget), explain);
      lines.set(kernel, drawn);
      kernel.anyMessage.connect((_, { msg }) => {
        const wait = readWait(msg);
        if (wait !== null) {
          drawn.show(wait);
        }
      });
      // A kernel that died or was restarted in mid-wait sends no more messages.
      kernel.statusChanged.connect((_, status) => {
        if (status !== 'busy') {
          drawn.clear();
        }
      });
      kernel.disposed.connect(() => drawn.clear());
    };
    kiwi.documents.changed.connect(() => {
      for (const { widget } of kiwi.documents.all) {
        const kernel = widget.sessionContext.session?.kernel;
        if (kernel) {
          follow(widget, kernel);
        }
      }
    });
  }
};

/** Returns `null` if the message is about something else. */
export function readWait(message: KernelMessage.IMessage): IWait | null {
  if (message.header.msg_type !== 'comm_msg') {
    return null;
  }
  const { comm_id: id, data } = (message as KernelMessage.ICommMsgMsg).content;
  if (typeof id !== 'string' || !id.startsWith(WAIT_ID)) {
    return null;
  }
  const { cell, widget, html } = data;
  return {
    id,
    cell: typeof cell === 'string' ? cell : null,
    widget: typeof widget === 'string' ? widget : null,
    html: typeof html === 'string' ? html : ''
  };
}

/** The lines in one notebook or console. */
export class WaitLines {
  /** `explain` shows the sidebar, which says more. */
  constructor(
    private readonly _cells: () => readonly ICell[],
    private readonly _explain?: () => void
  ) {}

  show(wait: IWait): void {
    if (wait.html === '') {
      this._remove(wait.id);
      return;
    }
    const area = this._cellOf(wait)?.outputArea;
    if (area === undefined) {
      return;
    }
    let line = this._drawn.get(wait.id);
    if (line === undefined) {
      const renderer = area.rendermime.createRenderer('text/html');
      const host = document.createElement('div');
      host.className = CLASS;
      host.append(renderer.node);
      if (this._explain !== undefined) {
        host.append(whyButton(this._explain));
      }
      (area.node.parentElement ?? area.node).after(host);
      line = { host, renderer };
      this._drawn.set(wait.id, line);
    }
    // As trusted as the cell's own output: the same kernel sends it while the cell runs.
    const model = area.rendermime.createModel({ data: { 'text/html': wait.html }, trusted: true });
    void line.renderer.renderModel(model);
  }

  private _cellOf(wait: IWait): ICell | undefined {
    const cells = this._cells();
    if (wait.widget === null) {
      return cells.find(({ model }) =>
        wait.cell === null ? model.executionState === 'running' : model.id === wait.cell
      );
    }
    // A widget inside another one has no output of its own: the last widgets are the likely ones.
    const drawn = cells.map(cell => ({ cell, widgets: widgetsOf(cell) }));
    const own = drawn.find(({ widgets }) => widgets.includes(wait.widget ?? ''));
    return (own ?? drawn.filter(({ widgets }) => widgets.length > 0).pop())?.cell;
  }

  clear(): void {
    for (const id of [...this._drawn.keys()]) {
      this._remove(id);
    }
  }

  private _remove(id: string): void {
    const line = this._drawn.get(id);
    this._drawn.delete(id);
    line?.host.remove();
    line?.renderer.dispose();
  }

  private readonly _drawn = new Map<string, { host: HTMLElement; renderer: Renderer }>();
}

function whyButton(explain: () => void): HTMLElement {
  const button = document.createElement('button');
  button.type = 'button';
  button.className = 'jp-Kiwi-button';
  button.dataset.kiwi = 'why-wait';
  button.textContent = trans.__('Why?');
  button.title = trans.__('Shows who has the GPU and who waits, in the sidebar.');
  button.addEventListener('click', explain);
  return button;
}

/** Returns the models of the widgets in the outputs of a cell. */
function widgetsOf({ outputArea }: ICell): string[] {
  const outputs = outputArea?.model;
  const views = Array.from({ length: outputs?.length ?? 0 }, (_, index) => {
    const view = outputs?.get(index).data[WIDGET_VIEW] as { model_id?: unknown } | undefined;
    return view?.model_id;
  });
  return views.filter(id => typeof id === 'string');
}

type Renderer = ReturnType<NonNullable<ICell['outputArea']>['rendermime']['createRenderer']>;

/** Returns the cells of a notebook panel or a console panel. */
function cellsOf(widget: Widget): readonly ICell[] {
  const { content, console } = widget as Widget & {
    content?: { widgets?: readonly ICell[] };
    console?: { cells: Iterable<ICell> };
  };
  return content?.widgets ?? Array.from(console?.cells ?? []);
}

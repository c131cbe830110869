/** The notebooks and consoles that are open in this page, by kernel. */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ISessionContext, IWidgetTracker } from '@jupyterlab/apputils';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';
import type { Widget } from '@lumino/widgets';

export type KernelWidget = Widget & { readonly sessionContext: ISessionContext };
export type KernelTracker = IWidgetTracker<KernelWidget>;

export interface IDocument {
  readonly widget: KernelWidget;
  readonly kernel: string | null;
}

export class KiwiDocuments {
  /** `trackers` of notebooks and of consoles, as far as this application has them. */
  constructor(
    private readonly _shell: JupyterFrontEnd.IShell,
    private readonly _trackers: readonly KernelTracker[]
  ) {
    const changed = () => this._changed.emit();
    const follow = (widget: KernelWidget) => {
      widget.sessionContext.kernelChanged.connect(changed);
      widget.disposed.connect(changed);
      changed();
    };
    for (const tracker of _trackers) {
      tracker.forEach(follow);
      tracker.widgetAdded.connect((_, widget) => follow(widget));
      tracker.currentChanged.connect(changed);
    }
    _shell.currentChanged?.connect(changed);
  }

  /** Emitted when another document comes to the front, one opens or closes, or one changes its
   * kernel. */
  get changed(): ISignal<KiwiDocuments, void> {
    return this._changed;
  }

  /** The notebook or console in front; null if another widget is. */
  get current(): IDocument | null {
    const widget = this._shell.currentWidget;
    const tracker = widget === null ? undefined : this._trackers.find(each => each.has(widget));
    return tracker === undefined ? null : asDocument(widget as KernelWidget);
  }

  get all(): IDocument[] {
    const found: IDocument[] = [];
    for (const tracker of this._trackers) {
      tracker.forEach(widget => found.push(asDocument(widget)));
    }
    return found.filter(each => !each.widget.isDisposed);
  }

  /** Brings the one with that kernel to the front; returns false if it is not open here. */
  activate(kernel: string): boolean {
    const document = this.all.find(each => each.kernel === kernel);
    if (kernel === '' || document === undefined) {
      return false;
    }
    this._shell.activateById(document.widget.id);
    return true;
  }

  private readonly _changed = new Signal<KiwiDocuments, void>(this);
}

function asDocument(widget: KernelWidget): IDocument {
  return { widget, kernel: widget.sessionContext.session?.kernel?.id ?? null };
}
